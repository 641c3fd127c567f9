"""Cohere's /v2/rerank."""

from __future__ import annotations

import uuid

from pydantic import Field

from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.dialects.bodies import Body, Count, Documents, Options, titles_and_texts

WARNING_CUT = "documents that did not fit were cut: see is_truncated"


class CohereBody(Options):
    """The request. ``model`` is read by nobody: the server has one."""

    query: str = Field(min_length=1, description="what to rank by")
    documents: Documents = Field(description="strings, or objects with text and title")
    model: str | None = Field(None, description="ignored: this server has one model")
    top_n: Count | None = Field(None, description="how many results; default all")
    return_documents: bool | None = Field(None, description="put each document's text into its result; default false")

    def to_call(self) -> RerankCall:
        """In the server's own words."""
        return RerankCall(self.query, titles_and_texts(self.documents), self.top_n, **self.common)


class CohereResult(Body):
    """One document."""

    index: int
    relevance_score: float


class CohereAnswer(Body):
    """The response, best first."""

    id: str
    results: list[CohereResult]
    meta: Json


def cohere_answer(body: CohereBody, answer: RerankAnswer) -> Json:
    """The response to ``body``."""
    results = []
    for document in answer.ranked:
        result: Json = {"index": document.index, "relevance_score": document.score}
        if body.return_documents:
            result["document"] = {"text": titles_and_texts(body.documents)[document.index][1]}
        results.append(result | document.extras())
    meta: Json = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": answer.num_tokens},
    }
    if answer.is_shortened:
        meta["warnings"] = [WARNING_CUT]
    return {"id": str(uuid.uuid4()), "results": results, "meta": meta}
