"""The ``rerankers`` package: a ranker class, also made by its ``Reranker(..., model_type="HeadRankRanker")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrank.integrations import needs
from headrank.integrations.shared_reranker import RerankerSettings, SharedReranker, document_from

with needs("rerankers"):
    from rerankers.documents import Document
    from rerankers.models import AVAILABLE_RANKERS
    from rerankers.models.ranker import BaseRanker
    from rerankers.results import RankedResults, Result
    from rerankers.utils import prep_docs


class HeadRankRanker(BaseRanker):
    """``rank`` gives RankedResults, best first, with ids, metadata and scores kept."""

    ranking_type = "listwise"

    def __init__(
        self,
        model_name_or_path: str = "embedded",
        verbose: int = 1,
        *,
        heads: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        title_key: str | None = "title",
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``; ``title_key`` names the metadata entry that holds a
        title.
        """
        self.verbose, self.title_key = verbose, title_key
        self._shared = SharedReranker(RerankerSettings(model_name_or_path, heads, device, dtype, max_length=max_length))
        self._shared.load()

    def rank(
        self,
        query: str,
        docs: str | list[str] | Document | list[Document],
        doc_ids: Sequence[str | int] | None = None,
        metadata: list[dict[str, Any]] | None = None,
    ) -> RankedResults:
        """Every document with its score and rank, best first."""
        documents = prep_docs(docs, doc_ids, metadata) if docs else []
        ranked = self._shared.rank(
            query, [document_from(item.text or "", item.metadata, self.title_key) for item in documents]
        )
        results = [
            Result(document=documents[place], score=score, rank=rank)
            for rank, (place, score) in enumerate(ranked, start=1)
        ]
        return RankedResults(results=results, query=query, has_scores=True)

    def score(self, query: str, doc: str) -> float:
        """The score of a list of one. It does not compare with scores in another list: use ``rank``."""
        return self._shared.rank(query, [doc])[0][1]


AVAILABLE_RANKERS["HeadRankRanker"] = HeadRankRanker
