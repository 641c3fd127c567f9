"""The model behind the server: loaded once, called from one thread."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from headrank import __version__
from headrank.reranking.rerank_requests import ListScores
from headrank.reranking.reranker import HeadRankReranker
from headrank.serving.batcher import Passages
from headrank.serving.call import Json
from headrank.serving.settings import ServeSettings

_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 2048, 32768  # a batch's requests are answered together: on a CPU larger ones only wait longer


class RerankerEngine:
    """A HeadRankReranker as the batcher's scorer, with what /info says about it."""

    def __init__(self, reranker: HeadRankReranker, name: str) -> None:
        self.reranker, self.name = reranker, name

    @classmethod
    def load(cls, settings: ServeSettings) -> RerankerEngine:
        """Load the model that the settings name."""
        store: dict[str, Any] = {"store": settings.store} if settings.store is not None else {}
        reranker = HeadRankReranker.from_pretrained(settings.model, settings.heads, device=settings.device, dtype=settings.dtype, **store)
        return cls(reranker, settings.name)

    def score(self, lists: Sequence[tuple[str, Passages]]) -> list[ListScores]:
        """The scores of each list.

        The reranker's own batch size is left as it is (1): a forward of several prompts rounds differently from a forward of one. The
        late layout pools the passages of all lists, in forwards whose shapes do not depend on who else is there.
        """
        return self.reranker.score_batch(
            [(query, [{"title": title, "text": text} for title, text in passages]) for query, passages in lists]
        )

    def free_memory(self) -> None:
        """Empty the allocator's cache on a GPU, collect garbage everywhere."""
        import torch

        gc.collect()
        if self.reranker.reader.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def default_batch_tokens(self) -> int:
        """A budget that suits the device."""
        return _CPU_BATCH_TOKENS if self.reranker.reader.device.type == "cpu" else _GPU_BATCH_TOKENS

    @property
    def facts(self) -> Json:
        """What is served, without paths of this machine."""
        reranker, reader = self.reranker, self.reranker.reader
        prompt = reranker.heads.prompt
        return {
            "model_id": self.name,
            "model_sha": None,
            "model_dtype": str(next(reader.model.parameters()).dtype).removeprefix("torch."),
            "model_type": {"reranker": {"id2label": {"0": "relevance"}, "label2id": {"relevance": 0}}},
            "version": __version__,
            "method": "headrank",
            "layout": prompt.document_layout,
            "is_score_relative_to_its_list": not prompt.is_late,
            "heads": len(reranker.heads.heads),
            "layers": {"used": reranker.layers_used, "of": reader.num_layers},
            "device": str(reader.device),
        }


def _documents(passages: Passages) -> list[dict[str, str]]:
    return [{"title": title, "text": text} for title, text in passages]
