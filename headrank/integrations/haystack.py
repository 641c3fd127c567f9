"""Haystack: a ranker component, serialisable, sync and async."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headrank.integrations import needs
from headrank.integrations.shared_reranker import (
    RerankerSettings,
    ScoredIndex,
    SharedReranker,
    check_top_k,
    document_from,
)
from headrank.reranking.reranker import DocumentLike

with needs("haystack-ai"):
    from haystack import Document, component, default_from_dict, default_to_dict


@component
class HeadRankRanker:
    """Keeps the ``top_k`` best documents, best first, with HeadRank's scores; ``warm_up`` loads the model."""

    def __init__(
        self,
        model: str = "embedded",
        *,
        heads: str | None = None,
        top_k: int | None = 10,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        title_key: str | None = "title",
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``; ``title_key`` names the entry of ``meta`` that
        holds a title.
        """
        check_top_k(top_k)
        self.settings = RerankerSettings(model, heads, device, dtype, max_length=max_length)
        self.top_k, self.title_key = top_k, title_key
        self._shared = SharedReranker(self.settings)

    def warm_up(self) -> None:
        """Load the model."""
        self._shared.load()

    def to_dict(self) -> dict[str, Any]:
        """The settings, for a pipeline's YAML."""
        settings = dataclasses.asdict(self.settings)
        del settings["batch_size"]  # a component runs one list at a time
        return default_to_dict(self, **settings, top_k=self.top_k, title_key=self.title_key)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadRankRanker:
        """The component that ``to_dict`` described."""
        return default_from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document], top_k: int | None = None) -> dict[str, list[Document]]:
        """{"documents": the best, best first}; ``top_k`` of the call goes before that of the component."""
        ranked = self._shared.rank(query, self._texts(documents), self.top_k if top_k is None else top_k)
        return {"documents": _kept(documents, ranked)}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """The same without blocking the event loop."""
        ranked = await self._shared.arank(query, self._texts(documents), self.top_k if top_k is None else top_k)
        return {"documents": _kept(documents, ranked)}

    def _texts(self, documents: Sequence[Document]) -> list[DocumentLike]:
        """A document without text (a picture, say) is an empty one, which goes last."""
        return [document_from(document.content or "", document.meta, self.title_key) for document in documents]


def _kept(documents: Sequence[Document], ranked: Sequence[ScoredIndex]) -> list[Document]:
    return [dataclasses.replace(documents[place], score=score) for place, score in ranked]
