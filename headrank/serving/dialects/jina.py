"""Jina's and vLLM's /v1/rerank and /rerank: one shape, of which each reads its part."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Annotated

from pydantic import Field

from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.dialects.bodies import Body, CountOrAll, Documents, Options, titles_and_texts


class JinaBody(Options):
    """The request."""

    query: str = Field(min_length=1, description="what to rank by")
    documents: Documents = Field(description="strings, or objects with text and title")
    model: str | None = Field(None, description="ignored: this server has one model")
    top_n: CountOrAll | None = Field(None, description="how many results; 0 or nothing for all")
    return_documents: bool | None = Field(
        None, description="put each document's text into its result; default true, as in vLLM"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 31)] | None = Field(
        None,
        description="vLLM's: read the first so many tokens of each document and no further chunk; -1 for what the "
        "model reads at once",
    )
    truncation: bool | None = Field(None, description="false: a document that would be cut is an error; default true")

    def to_call(self) -> RerankCall:
        """In the server's own words."""
        options = self.common
        if self.truncate_prompt_tokens is not None:
            options["max_chunks_per_doc"] = 1
            options["max_tokens_per_doc"] = self.truncate_prompt_tokens if self.truncate_prompt_tokens > 0 else None
        call = RerankCall(self.query, titles_and_texts(self.documents), self.top_n or None, **options)
        return dataclasses.replace(call, may_cut=self.truncation is not False)


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
        results.append(result | document.extras())
    usage = {"total_tokens": answer.num_tokens, "prompt_tokens": answer.num_tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model, "usage": usage, "results": results}
