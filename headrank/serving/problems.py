"""A request that cannot be answered: the status, the field, one sentence, and when to come back.

Every client reads the same body: ``message`` is where Cohere's looks, ``detail`` where Jina's does, ``error.message``
and ``error.param`` where those of OpenAI's shape (vLLM) do. TEI's clients expect ``error`` to be the sentence itself
and get it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

_KINDS = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    422: "unprocessable",
    429: "overloaded",
    500: "internal_error",
    503: "unavailable",
}
# TEI's own words where it has one for the case
_TEI_KINDS = {
    400: "Validation",
    413: "Validation",
    422: "Tokenizer",
    429: "Overloaded",
    503: "Unhealthy",
    500: "Backend",
}
# members of unions; the others have a sign in their name
_NOT_FIELDS = frozenset({"body", "str", "DocumentObject", "ShownDocument"})


class Problem(HTTPException):
    """An answer that is not 200. ``field`` names the part of the request that is at fault, as in documents[3]."""

    def __init__(self, status: int, message: str, *, field: str | None = None, retry_after: int | None = None) -> None:
        """``message`` goes to the client: it may quote the request, and is never logged."""
        headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.message, self.field = message, field


def problem_response(problem: Problem, *, is_tei: bool = False) -> JSONResponse:
    """The problem as JSON."""
    status = problem.status_code
    message = f"{problem.field}: {problem.message}" if problem.field else problem.message
    if is_tei:
        body: dict[str, Any] = {
            "error": message,
            "error_type": _TEI_KINDS.get(status, "Validation"),
            "param": problem.field,
        }
    else:
        error = {"message": message, "type": _KINDS.get(status, "error"), "param": problem.field, "code": status}
        body = {"message": message, "detail": message, "error": error}
    return JSONResponse(body, status, dict(problem.headers or {}))


def problem_of_validation(error: RequestValidationError) -> Problem:
    """The first thing that a body's schema refuses, with the name of its field."""
    first = _worst(error.errors())
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON ({first.get('ctx', {}).get('error', 'syntax error')})", field="body")
    field = field_name(first["loc"])
    if field == "body" and first["type"] in ("model_attributes_type", "model_type", "dict_type", "union_tag_not_found"):
        return Problem(400, "a JSON object is needed, sent with Content-Type: application/json", field="body")
    return Problem(400, _lower_first(str(first["msg"])), field=field)


def _worst(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the errors of a union (a string or an object) the one that got furthest into the body."""
    return max(errors, key=lambda error: len(error["loc"]))


def field_name(location: Sequence[str | int]) -> str:
    """documents[3].text from ("body", "rerank-documents", "documents", 3, "DocumentObject", "text"); the body itself
    has no other name.
    """
    name = ""
    # parameters of the address are named by themselves
    for part in location[1:] if location[:1] == ("query",) else location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _NOT_FIELDS and part.replace(".", "").isidentifier():
            name += f".{part}" if name else part
    return name or "body"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


async def on_problem(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of every Problem; its status is kept for the metrics."""
    assert isinstance(error, StarletteHTTPException)
    if isinstance(error, Problem):
        problem = error
    elif error.status_code == 400:  # FastAPI's word for bytes that are no JSON text at all
        problem = Problem(400, "the body is not JSON in UTF-8, or too deeply nested", field="body")
    else:
        problem = Problem(error.status_code, str(error.detail))
    return problem_response(problem, is_tei=getattr(request.state, "is_tei", False))


async def on_bug(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of everything else: a bug of the server, whose place is in the log."""
    return problem_response(
        Problem(500, "the server failed; its log says where"), is_tei=getattr(request.state, "is_tei", False)
    )


def place_of(error: BaseException) -> str:
    """Type and place of an error without its message: messages may quote texts, and the log holds none."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" in {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}{place}"


async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of bodies that do not fit their schema."""
    assert isinstance(error, RequestValidationError)
    is_tei = isinstance(error.body, dict) and "texts" in error.body
    return problem_response(problem_of_validation(error), is_tei=is_tei)
