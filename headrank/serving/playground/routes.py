"""What the page asks for: itself, the offered collections, and a ranking as the viewer shows it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from headrank.formats import Document
from headrank.reports.viewer.contents import build_view
from headrank.reports.viewer.page import to_fragment
from headrank.serving.call import Json, RerankCall
from headrank.serving.dialects.bodies import DocumentObject, Options, titles_and_texts
from headrank.serving.playground.offered import OfferedCollection, read_collections
from headrank.serving.problems import Problem
from headrank.serving.schema import ERRORS, REFUSED
from headrank.serving.state import ServerState

if TYPE_CHECKING:
    from headrank.serving.service import Explained

MOST_SHOWN = 100  # passages of one view: each word carries a number for each head
_HEADERS = {
    # nothing from elsewhere, and no script but the page's own files; the shades are style attributes
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES = {
    "playground.css": ("headrank.serving.playground", "text/css"),
    "playground.js": ("headrank.serving.playground", "text/javascript"),
    "viewer.css": ("headrank.reports", "text/css"),
    "viewer.js": ("headrank.reports", "text/javascript"),
}
Admit = Callable[[Request], str]


class ShownDocument(DocumentObject):
    """A passage with what the page may say about it."""

    id: str | None = Field(None, description="shown beside the passage")
    grade: Annotated[int, Field(ge=-100, le=100)] | None = Field(
        None, description="its judged relevance; 1 and more is relevant"
    )


class ViewBody(Options):
    """A rerank request whose ranking is to be looked at."""

    query: str = Field(min_length=1, description="what to rank by")
    documents: Annotated[list[str | ShownDocument], Field(min_length=1, max_length=MOST_SHOWN)]

    def to_call(self) -> RerankCall:
        """In the server's own words."""
        return RerankCall(self.query, titles_and_texts(self.documents), **self.common)


def add_playground(app: FastAPI, server: ServerState, admit: Admit) -> None:
    """The page and its endpoints; collections that cannot be read are an InputError before the server listens."""
    collections = read_collections(server.settings.collections)

    @app.get("/playground/collections", tags=["playground"], summary="what the page offers", responses=REFUSED)
    async def offered(request: Request) -> list[Json]:
        admit(request)
        return [{"name": name, "queries": len(collection.requests)} for name, collection in collections.items()]

    @app.get(
        "/playground/queries",
        tags=["playground"],
        summary="queries of a collection",
        responses=_errors(400, 401, 403, 404),
    )
    async def queries(
        request: Request,
        collection: Annotated[str, Query(max_length=200)],
        contains: Annotated[str, Query(max_length=1000)] = "",
    ) -> list[Json]:
        admit(request)
        return _found(collections, collection).queries(contains)

    @app.get(
        "/playground/candidates",
        tags=["playground"],
        summary="a query with its passages",
        responses=_errors(400, 401, 403, 404),
    )
    async def candidates(
        request: Request,
        collection: Annotated[str, Query(max_length=200)],
        query: Annotated[str, Query(max_length=200)],
    ) -> Json:
        admit(request)
        found = _found(collections, collection).candidates(query)
        if found is None:
            raise Problem(404, "no such query with candidates in this collection", field="query")
        return found

    @app.post(
        "/playground/view",
        tags=["playground"],
        summary="a ranking with shaded words, as HTML within JSON",
        responses=ERRORS,
    )
    async def view(request: Request, body: ViewBody) -> Response:
        client = admit(request)
        service, _ = server.ready()
        found = await service.explain(body.to_call(), client, request.receive)
        return JSONResponse({"fragment": fragment_of(body, found, server.settings.name), "order": found.order})

    _add_files(app)  # last: its path would take the others' names


def _errors(*statuses: int) -> dict[int | str, Json]:
    known: dict[int | str, Json] = {404: {"model": ERRORS[400]["model"], "description": "not among what is offered"}}
    return {status: known.get(status) or ERRORS[status] for status in statuses}


def _found(collections: dict[str, OfferedCollection], name: str) -> OfferedCollection:
    if name not in collections:
        raise Problem(404, "not among the collections that this server offers", field="collection")
    return collections[name]


def _add_files(app: FastAPI) -> None:
    page = _asset("headrank.serving.playground", "index.html")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise Problem(404, "Not Found")
        package, media_type = _FILES[name]
        return Response(_asset(package, name), media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)


def _asset(package: str, name: str) -> str:
    return resources.files(package).joinpath(f"assets/{name}").read_text(encoding="utf-8")


def fragment_of(body: ViewBody, found: Explained, model: str) -> str:
    """The viewer's table for one ranking: every text in it is escaped there."""
    documents, grades = [], {}
    for number, document in enumerate(body.documents, start=1):
        given = document.id if isinstance(document, ShownDocument) else None
        name = f"{number} · {given}" if given else str(number)
        title, text = titles_and_texts([document])[0]
        documents.append(Document(name, title, text))
        if isinstance(document, ShownDocument) and document.grade is not None:
            grades[name] = document.grade
    view = build_view(
        found.explanation,
        documents,
        query_id="",
        query=body.query,
        model=model,
        method="HeadRank",
        ranks={"Given": {document.doc_id: place for place, document in enumerate(documents, start=1)}},
        grades=grades or None,
        title_lengths=[len(" ".join(document.title.split())) for document in documents],
    )
    return to_fragment(view)
