"""The server as a tool for agents: the Model Context Protocol at /mcp, over plain HTTP, without sessions and without a
stream.

One tool, ``rerank``, in the same queue and with the same limits as every other request. Of the protocol this is the
part that a tool without state needs: initialize, ping, tools/list, tools/call; a GET, which would open a stream, is a
405 as the protocol has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from headrank import __version__
from headrank.serving.call import Json
from headrank.serving.dialects.cohere import CohereBody, cohere_answer
from headrank.serving.problems import Problem, problem_of_validation
from headrank.serving.state import ServerState

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")  # newest first
_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS = -32700, -32600, -32601, -32602
_TOOL: Json = {
    "name": "rerank",
    "title": "Rerank passages",
    "description": "Order passages by how relevant they are to a query. Give what a search found; the answer names "
    "each passage by its "
    "index, best first, with its score and its text.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "minLength": 1, "description": "what to rank by"},
            "documents": {"type": "array", "minItems": 1, "items": {"type": "string"}, "description": "the passages"},
            "top_n": {"type": "integer", "minimum": 1, "description": "how many to return; default all"},
            "threshold": {"type": "number", "description": "leave out passages whose score is below"},
            "return_highlights": {
                "type": "boolean",
                "description": "also the sentences that made the score, and the text pruned to them",
            },
        },
        "required": ["query", "documents"],
    },
    "annotations": {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False},
}
Admit = Callable[[Request], str]


class RpcError(Exception):
    """A JSON-RPC error: the request itself was wrong."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def add_mcp(app: FastAPI, server: ServerState, admit: Admit) -> None:
    """The endpoint."""

    async def call(params: Json, client: str, request: Request) -> Json:
        """tools/call: what the tool says of its own failure is a result, so that the agent reads it."""
        if params.get("name") != _TOOL["name"]:
            raise RpcError(_INVALID_PARAMS, f"no such tool; this server has {_TOOL['name']!r}")
        try:
            body = _body_of(params.get("arguments"))
            service, _ = server.ready()
            [answer] = await service.rank([body.to_call()], client, request.receive)
        except Problem as problem:
            words = f"{problem.field}: {problem.message}" if problem.field else problem.message
            return {"content": [{"type": "text", "text": words}], "isError": True}
        found = {"results": cohere_answer(body, answer)["results"]}
        return {
            "content": [{"type": "text", "text": json.dumps(found, ensure_ascii=False)}],
            "structuredContent": found,
            "isError": False,
        }

    @app.post("/mcp", include_in_schema=False)
    async def mcp(request: Request) -> Response:
        _refuse_strangers(request)
        client = admit(request)
        number: Any = None
        try:
            message = _message_of(await request.body())
            number = message.get("id")
            if number is None:  # a notification, or an answer to a question that was never asked
                return Response(status_code=202)
            params = message.get("params") or {}
            if not isinstance(params, dict):
                raise RpcError(_INVALID_PARAMS, "params must be an object")
            result = (
                await call(params, client, request)
                if message["method"] == "tools/call"
                else _answer(message["method"], params)
            )
        except RpcError as error:
            status = 400 if error.code in (_PARSE_ERROR, _INVALID_REQUEST) else 200
            return JSONResponse(
                {"jsonrpc": "2.0", "id": number, "error": {"code": error.code, "message": error.message}}, status
            )
        return JSONResponse({"jsonrpc": "2.0", "id": number, "result": result})


def _refuse_strangers(request: Request) -> None:
    """A page of another site that a browser on this machine shows may not use the tool (the protocol asks for this)."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Problem(403, "not from this server's own pages", field="Origin")
    version = request.headers.get("mcp-protocol-version")
    if version is not None and version not in VERSIONS:
        raise Problem(400, f"this server speaks {', '.join(VERSIONS)}", field="MCP-Protocol-Version")


def _message_of(data: bytes) -> Json:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise RpcError(_PARSE_ERROR, "the body is not JSON") from None
    is_request = isinstance(message, dict) and message.get("jsonrpc") == "2.0"
    number = message.get("id") if is_request else None
    if not is_request or not isinstance(number, str | int | None) or isinstance(number, bool):
        raise RpcError(_INVALID_REQUEST, "one JSON-RPC 2.0 message is needed")
    if number is not None and not isinstance(message.get("method"), str):
        raise RpcError(_INVALID_REQUEST, "a request names its method")
    return dict(message)


def _answer(method: str, params: Json) -> Json:
    """Everything but tools/call."""
    if method == "initialize":
        wanted = params.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "headrank", "title": "HeadRank", "version": __version__},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": [_TOOL]}
    raise RpcError(_NO_METHOD, "no such method; this server has tools")


def _body_of(arguments: Any) -> CohereBody:
    """The tool's arguments, checked as the body of /v2/rerank."""
    try:
        return CohereBody.model_validate(
            {**(arguments if isinstance(arguments, dict) else {}), "return_documents": True}
        )
    except ValidationError as error:
        found = problem_of_validation(RequestValidationError(error.errors()))
        raise Problem(400, found.message, field=found.field) from None
