"""What the OpenAPI description says beyond the endpoints' own types: errors, keys, aliases."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorAnswer(BaseModel):
    """The body of every answer that is not 200; a TEI request gets ``error`` as a string, with ``error_type``."""

    message: str | None = None
    detail: str | None = None
    error: ErrorDetail | str


_TEXTS = {
    400: "the body does not fit its schema; the field is named",
    401: "no key, or one that is not known",
    403: "a server without keys was asked by a name that is not this machine's",
    408: "the body did not arrive in time, or the client left",
    413: "too many bytes, documents or tokens",
    422: "well formed, and still impossible to rank",
    429: "the queue is full; Retry-After says when to come back",
    500: "the computation of this request failed; others are not affected",
    503: "loading, draining, or no answer in time",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _TEXTS.items()
}
REFUSED: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 403)}


def describe(app: FastAPI) -> None:
    """Add to the generated description what it cannot know."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
