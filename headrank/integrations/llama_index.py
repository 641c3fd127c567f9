"""LlamaIndex: a node postprocessor that reranks, sync and async."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrank.errors import InputError
from headrank.integrations import needs
from headrank.integrations.shared_reranker import RerankerSettings, ScoredIndex, SharedReranker, document_from
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

with needs("llama-index-core"):
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle


class HeadRankPostprocessor(BaseNodePostprocessor):
    """Keeps the ``top_n`` best nodes, best first, with HeadRank's scores; the model loads on first use."""

    model: str = Field(default="embedded", description="'embedded', a Hugging Face directory or hub name")
    heads: str | None = Field(default=None, description="heads.json or 'all'; default: the model's headrank.json")
    device: str | None = Field(default=None, description="cpu, cuda, ...")
    dtype: str | None = Field(default=None, description="auto, float32, bfloat16, float16, int8")
    max_length: int | None = Field(default=None, description="tokens of a prompt at most")
    top_n: int | None = Field(default=None, ge=1, description="nodes kept; default: all")
    title_key: str | None = Field(default="title", description="metadata entry that holds a title")
    keep_retrieval_score: bool = Field(
        default=False, description="keep the retriever's score as metadata['retrieval_score']"
    )
    _shared: SharedReranker = PrivateAttr()

    def __init__(self, reranker: HeadRankReranker | None = None, **settings: Any) -> None:
        """The fields by name, and on request a ``reranker`` that is loaded already."""
        super().__init__(**settings)
        self._shared = SharedReranker(
            RerankerSettings(self.model, self.heads, self.device, self.dtype, max_length=self.max_length), reranker
        )

    @classmethod
    def class_name(cls) -> str:
        """The name that LlamaIndex serialises."""
        return "HeadRankPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._kept(nodes, self._shared.rank(_query(query_bundle), self._texts(nodes), self.top_n))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._kept(nodes, await self._shared.arank(_query(query_bundle), self._texts(nodes), self.top_n))

    def _texts(self, nodes: Sequence[NodeWithScore]) -> list[DocumentLike]:
        """The plain content: metadata that other nodes show to an embedding model would be read as text of the
        passage.
        """
        return [
            document_from(item.node.get_content(MetadataMode.NONE), item.node.metadata, self.title_key)
            for item in nodes
        ]

    def _kept(self, nodes: Sequence[NodeWithScore], ranked: Sequence[ScoredIndex]) -> list[NodeWithScore]:
        """New NodeWithScore objects around the same nodes; a node is copied only where something is written into it."""
        kept = []
        for place, score in ranked:
            node = nodes[place].node
            if self.keep_retrieval_score:
                node = node.model_copy(update={"metadata": {**node.metadata, "retrieval_score": nodes[place].score}})
            kept.append(NodeWithScore(node=node, score=score))
        return kept


def _query(query_bundle: QueryBundle | None) -> str:
    if query_bundle is None:
        raise InputError("HeadRankPostprocessor needs the query; call postprocess_nodes(nodes, query_str=...)")
    return query_bundle.query_str
