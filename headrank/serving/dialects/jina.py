"""Jina's and vLLM's /v1/rerank and /rerank: one shape, of which each reads its part."""

from __future__ import annotations

import uuid

from pydantic import Field

from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.dialects.bodies import Body, CountOrAll, Documents, titles_and_texts


class JinaBody(Body):
    """The request."""

    query: str = Field(min_length=1, description="what to rank by")
    documents: Documents = Field(description="strings, or objects with text and title")
    model: str | None = Field(None, description="ignored: this server has one model")
    top_n: CountOrAll | None = Field(None, description="how many results; 0 or nothing for all")
    return_documents: bool | None = Field(None, description="put each document's text into its result; default true, as in vLLM")

    def to_call(self) -> RerankCall:
        """In the server's own words."""
        return RerankCall(self.query, titles_and_texts(self.documents), self.top_n or None)


class JinaResult(Body):
    """One document."""

    index: int
    relevance_score: float
    document: Json | None = None


class JinaAnswer(Body):
    """The response, best first."""

    id: str
    model: str
    usage: Json
    results: list[JinaResult]


def jina_answer(body: JinaBody, answer: RerankAnswer, model: str) -> Json:
    """The response to ``body``."""
    texts = titles_and_texts(body.documents)
    results = []
    for document in answer.ranked:
        result: Json = {"index": document.index, "relevance_score": document.score}
        if body.return_documents is not False:
            result["document"] = {"text": texts[document.index][1]}
        if document.is_cut:
            result["is_truncated"] = True
        results.append(result)
    usage = {"total_tokens": answer.num_tokens, "prompt_tokens": answer.num_tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model, "usage": usage, "results": results}
