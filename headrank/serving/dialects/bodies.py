"""What the bodies of all dialects share: strict fields, unknown ones ignored, documents as strings or objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

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


class Options(Body):
    """What headrank takes beyond the dialects' own fields, and some of them share."""

    max_tokens_per_doc: Count | None = Field(None, description="tokens kept of each document; the rest is cut")
    max_chunks_per_doc: Count | None = Field(
        None, description="chunks that a long document is read in; the best one gives the score"
    )
    threshold: float | None = Field(None, description="leave out results whose score is below")
    raw_scores: bool | None = Field(
        None, description="the model's score even where the server has a curve to relevance"
    )
    return_highlights: bool | None = Field(
        None, description="sentences with their part of the score, and the text pruned to the best"
    )

    @property
    def common(self) -> dict[str, Any]:
        """These fields as a RerankCall has them."""
        return {
            "max_tokens_per_doc": self.max_tokens_per_doc,
            "max_chunks_per_doc": self.max_chunks_per_doc,
            "threshold": self.threshold,
            "wants_raw": bool(self.raw_scores),
            "wants_highlights": bool(self.return_highlights),
        }


def title_and_text(document: Document) -> tuple[str, str]:
    """As the method takes it."""
    return ("", document) if isinstance(document, str) else (document.title or "", document.text)


def titles_and_texts(documents: Sequence[Document]) -> tuple[tuple[str, str], ...]:
    """All of them."""
    return tuple(title_and_text(document) for document in documents)
