"""BEIR: ``rerank(corpus, queries, results, top_k)``, with titles as titles and every list read whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrank.errors import InputError
from headrank.integrations import needs
from headrank.integrations.runs import RunScores, rerank_scores, shared_reranker
from headrank.integrations.shared_reranker import document_from
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

with needs("beir"):
    from beir.reranking.rerank import Rerank


class HeadRankRerank(Rerank):
    """BEIR's Rerank on HeadRank: what is below ``top_k`` is left out, as there."""

    def __init__(
        self, model: str | HeadRankReranker = "embedded", *, heads: str | None = None, **settings: Any
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``, or a reranker that is loaded."""
        self.shared = shared_reranker(model, heads, **settings)
        super().__init__(self.shared)

    def rerank(
        self,
        corpus: Mapping[str, Mapping[str, str]],
        queries: Mapping[str, str],
        results: Mapping[str, Mapping[str, float]],
        top_k: int,
    ) -> RunScores:
        """{query id: {document id: score}} of the ``top_k`` best results of every query."""
        if top_k < 1:
            raise InputError(f"`top_k` {top_k} must be at least 1")

        def text_of(doc_id: str) -> DocumentLike:
            return document_from(corpus[doc_id].get("text") or "", corpus[doc_id])

        self.rerank_results = rerank_scores(self.shared, results, queries, text_of, top_k, keep_rest=False)
        return self.rerank_results
