"""The HTTP application: which path speaks which dialect."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import Discriminator, Tag
from starlette.exceptions import HTTPException

from headrank import __version__
from headrank.serving.access import require_own_name
from headrank.serving.api_page import api_page
from headrank.serving.body_limit import BodyLimit
from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.counting import Counting
from headrank.serving.dialects.cohere import CohereAnswer, CohereBody, cohere_answer
from headrank.serving.dialects.jina import JinaAnswer, JinaBody, jina_answer
from headrank.serving.dialects.score import ScoreAnswer, ScoreBody, score_answer
from headrank.serving.dialects.tei import TeiBody, TeiRank, tei_answer
from headrank.serving.engine import RerankerEngine
from headrank.serving.problems import on_bug, on_invalid_body, on_problem
from headrank.serving.schema import ERRORS, REFUSED, describe
from headrank.serving.settings import ServeSettings
from headrank.serving.state import LoadEngine, ServerState

Rerank = Annotated[
    Annotated[JinaBody, Tag("rerank-documents")] | Annotated[TeiBody, Tag("rerank-texts")],
    Discriminator(lambda body: "rerank-texts" if isinstance(body, dict) and "texts" in body else "rerank-documents"),
]
_BODY_SECONDS = 30.0
_log = logging.getLogger(__name__)


def build_app(settings: ServeSettings, load: LoadEngine = RerankerEngine.load) -> FastAPI:
    """The application; its state (``app.state.server``) loads the model when the server starts."""
    server = ServerState(settings, load)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await server.stop()

    app = FastAPI(title="HeadRank", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_exception_handler(HTTPException, on_problem)
    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    _add_rerank(app, server)
    _add_state(app, server)
    if settings.has_mcp:
        from headrank.serving.mcp import add_mcp

        add_mcp(app, server, lambda request: _admit(request, server))
    if settings.has_playground:
        from headrank.serving.playground.routes import add_playground

        add_playground(app, server, lambda request: _admit(request, server))
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=_BODY_SECONDS)
    app.add_middleware(Counting, server=server)  # outermost: it counts what the limit refuses, too
    describe(app)
    _add_pages(app)
    return app


def _add_rerank(app: FastAPI, server: ServerState) -> None:
    """The endpoints that rank."""
    name = server.settings.name

    async def answers(request: Request, calls: Sequence[RerankCall]) -> list[RerankAnswer]:
        client = _admit(request, server)
        service, _ = server.ready()
        request.state.num_documents = sum(len(call.documents) for call in calls)
        if server.settings.logs_texts:
            for call in calls:
                _log.info("%s", json.dumps({"query": call.query, "documents": call.documents}, ensure_ascii=False))
        return await service.rank(calls, client, request.receive)

    @app.post("/v2/rerank", tags=["rerank"], summary="Cohere v2", response_model=CohereAnswer, responses=ERRORS)
    async def cohere(request: Request, body: CohereBody) -> Response:
        [answer] = await answers(request, [body.to_call()])
        return JSONResponse(cohere_answer(body, answer), headers=answer.headers)

    @app.post("/v1/rerank", tags=["rerank"], summary="Jina, vLLM", response_model=JinaAnswer, responses=ERRORS)
    async def jina(request: Request, body: JinaBody) -> Response:
        [answer] = await answers(request, [body.to_call()])
        return JSONResponse(jina_answer(body, answer, name), headers=answer.headers)

    @app.post(
        "/rerank",
        tags=["rerank"],
        summary="Jina, vLLM; TEI with 'texts'",
        response_model=JinaAnswer | list[TeiRank],
        responses=ERRORS,
    )
    async def either(request: Request, body: Rerank) -> Response:
        request.state.is_tei = isinstance(body, TeiBody)
        [answer] = await answers(request, [body.to_call()])
        content: Any = tei_answer(body, answer) if isinstance(body, TeiBody) else jina_answer(body, answer, name)
        return JSONResponse(content, headers=answer.headers)

    @app.post("/score", tags=["rerank"], summary="vLLM", response_model=ScoreAnswer, responses=ERRORS)
    @app.post("/v1/score", tags=["rerank"], summary="vLLM", response_model=ScoreAnswer, responses=ERRORS)
    async def score(request: Request, body: ScoreBody) -> Response:
        found = await answers(request, body.to_calls())
        return JSONResponse(score_answer(found, name), headers=found[0].headers if len(found) == 1 else {})


def _add_state(app: FastAPI, server: ServerState) -> None:
    """The endpoints that say how the server is."""

    @app.get(
        "/health", tags=["state"], summary="200 while the process lives and its model did not fail", responses={503: {}}
    )
    async def health() -> Response:
        return JSONResponse({"status": server.phase}, 503 if server.phase == "failed" else 200)

    @app.get("/ready", tags=["state"], summary="200 when requests are taken", responses={503: {}})
    async def ready() -> Response:
        server.ready()
        return JSONResponse({"status": server.phase})

    @app.get("/info", tags=["state"], summary="the model and the limits", responses={**REFUSED, 503: ERRORS[503]})
    async def info(request: Request) -> Json:
        _admit(request, server)
        service, engine = server.ready()
        settings = server.settings
        return {
            **engine.facts,
            "max_concurrent_requests": settings.max_queue,
            "max_batch_tokens": service.batcher.full_budget,
            "max_client_batch_size": settings.max_documents,
            "max_list_tokens": settings.max_list_tokens,
            "max_query_tokens": settings.max_query_tokens,
            "max_body_bytes": settings.max_body_bytes,
            "request_seconds": settings.request_seconds,
        }

    @app.get("/v1/models", tags=["state"], summary="the one model, as OpenAI's clients ask for it", responses=REFUSED)
    async def models(request: Request) -> Json:
        _admit(request, server)
        return {"object": "list", "data": [{"id": server.settings.name, "object": "model", "owned_by": "headrank"}]}

    @app.get("/metrics", tags=["state"], summary="Prometheus", response_class=PlainTextResponse, responses=REFUSED)
    async def metrics(request: Request) -> Response:
        _admit(request, server)
        return PlainTextResponse(server.metrics.page(), media_type="text/plain; version=0.0.4")


def _add_pages(app: FastAPI) -> None:
    """The API for people; last, as it describes the rest."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        policy = {
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            "frame-ancestors 'none'"
        }
        return HTMLResponse(api_page(app.openapi()), headers=policy)


def _admit(request: Request, server: ServerState) -> str:
    """The client's name for the queue, or a 401 or 403."""
    settings = server.settings
    if not server.keys.are_needed and settings.is_loopback and not settings.is_open_to_anyone:
        require_own_name(request.headers.get("host", ""))
    address = request.client.host if request.client else "unknown"
    return server.keys.client(request.headers.get("authorization"), address)
