"""text-embeddings-inference's /rerank: known by its field ``texts``; the answer is a bare list."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.dialects.bodies import Body


class TeiBody(Body):
    """The request."""

    query: str = Field(min_length=1, description="what to rank by")
    texts: Annotated[list[str], Field(min_length=1)] = Field(description="the documents")
    raw_scores: bool | None = Field(
        None, description="the model's score even where the server has a calibrated relevance"
    )
    return_text: bool | None = Field(None, description="put each text beside its score")
    truncate: bool | None = Field(None, description="false: a text that would be cut is an error; default true")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="which end a cut text loses"
    )

    def to_call(self) -> RerankCall:
        """In the server's own words."""
        return RerankCall(
            self.query,
            tuple(("", text) for text in self.texts),
            keeps_end=self.truncation_direction in ("left", "Left"),
            may_cut=self.truncate is not False,
            wants_raw=bool(self.raw_scores),
            field="texts",
        )


class TeiRank(Body):
    """One text."""

    index: int
    score: float
    text: str | None = None


def tei_answer(body: TeiBody, answer: RerankAnswer) -> list[Json]:
    """The response to ``body``, best first."""
    rows: list[dict[str, Any]] = []
    for document in answer.ranked:
        row: Json = {"index": document.index, "score": document.score}
        if body.return_text:
            row["text"] = body.texts[document.index]
        rows.append(row | document.extras())
    return rows
