"""What the bodies of all dialects share: strict fields, unknown ones ignored, documents as strings or objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=1 << 31)]
CountOrAll = Annotated[int, Field(ge=0, le=1 << 31)]  # vLLM's clients send 0 for all


class Body(BaseModel):
    """Clients send more than they need: unknown fields are ignored, known ones must have their type."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class DocumentObject(Body):
    """A document with its title; other fields are ignored."""

    text: str
    title: str | None = None


Document = str | DocumentObject
Documents = Annotated[list[Document], Field(min_length=1)]


def title_and_text(document: Document) -> tuple[str, str]:
    """As the method takes it."""
    return ("", document) if isinstance(document, str) else (document.title or "", document.text)


def titles_and_texts(documents: Sequence[Document]) -> tuple[tuple[str, str], ...]:
    """All of them."""
    return tuple(title_and_text(document) for document in documents)
