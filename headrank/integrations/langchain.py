"""LangChain: a document compressor that reranks, sync and async."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field, PrivateAttr

from headrank.integrations import needs
from headrank.integrations.shared_reranker import RerankerSettings, ScoredIndex, SharedReranker, document_from
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

with needs("langchain-core"):
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document


class HeadRankCompressor(BaseDocumentCompressor):
    """Keeps the ``top_n`` best documents, best first, each a copy with its score in the metadata; the model loads on
    first use.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    model: str = "embedded"
    heads: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    top_n: int | None = Field(default=3, ge=1)
    title_key: str | None = "title"
    score_key: str = "relevance_score"
    reranker: HeadRankReranker | None = Field(default=None, exclude=True)
    _shared: SharedReranker = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Nothing is loaded yet."""
        self._shared = SharedReranker(
            RerankerSettings(self.model, self.heads, self.device, self.dtype, max_length=self.max_length), self.reranker
        )

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The best documents with their scores; the documents given stay as they are."""
        return self._kept(documents, self._shared.rank(query, self._texts(documents), self.top_n))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The same without blocking the event loop."""
        return self._kept(documents, await self._shared.arank(query, self._texts(documents), self.top_n))

    def _texts(self, documents: Sequence[Document]) -> list[DocumentLike]:
        return [document_from(document.page_content, document.metadata, self.title_key) for document in documents]

    def _kept(self, documents: Sequence[Document], ranked: Sequence[ScoredIndex]) -> list[Document]:
        """Copies, for a retriever's cache may hold the originals."""
        return [
            documents[place].model_copy(update={"metadata": {**documents[place].metadata, self.score_key: score}})
            for place, score in ranked
        ]
