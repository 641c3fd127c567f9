"""The model behind the server: loaded once, called from one thread; its tokenizer has a twin for measuring texts in
another.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrank import __version__
from headrank.files import read_json
from headrank.method.relevance import RelevanceCurve
from headrank.reranking.explain import Explanation
from headrank.reranking.exported_model import read_headrank_json
from headrank.reranking.late_reranker import LateReranker
from headrank.reranking.rerank_requests import ListScores
from headrank.reranking.reranker import HeadRankReranker
from headrank.reranking.shipped_readouts import model_to_read
from headrank.serving.batcher import Passages
from headrank.serving.call import Json
from headrank.serving.server_metrics import ServerMetrics
from headrank.serving.settings import ServeSettings

# a batch's requests are answered together: on a CPU larger ones only wait longer
_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 2048, 32768


class RerankerEngine:
    """A HeadRankReranker as the batcher's scorer, with what /info says about it."""

    def __init__(self, reranker: HeadRankReranker, name: str, relevance: RelevanceCurve | None = None) -> None:
        self.reranker, self.name, self.relevance = reranker, name, relevance
        # one tokenizer may not be used by two threads at once
        self._tokenizer = copy.deepcopy(reranker.reader.tokenizer)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, settings: ServeSettings) -> RerankerEngine:
        """Load the model that the settings name."""
        options: dict[str, Any] = {"store": settings.store, "store_add": settings.store_add}
        if settings.key_cache_mb is not None:
            options["key_cache_bytes"] = settings.key_cache_mb << 20
        reranker = HeadRankReranker.from_pretrained(
            settings.model, settings.heads, device=settings.device, dtype=settings.dtype, **options
        )
        return cls(reranker, settings.name, find_relevance(settings))

    def score(self, lists: Sequence[tuple[str, Passages]]) -> list[ListScores]:
        """The scores of each list.

        The reranker's own batch size is left as it is: a forward of several prompts rounds differently from a forward
        of one. The late layout pools the passages of all lists, in forwards whose shapes do not depend on who else is
        there.
        """
        return self.reranker.score_batch([(query, _documents(passages)) for query, passages in lists])

    def explain(self, query: str, passages: Passages, chosen: Sequence[int]) -> Explanation:
        """Where the scores came from. In the late layout only the ``chosen`` passages are read; else all, as their
        list decides.
        """
        if self.is_late:
            return self.reranker.explain(query, _documents([passages[index] for index in chosen]))
        found = self.reranker.explain(query, _documents(passages))
        indices = list(chosen)
        return Explanation(
            found.scores[indices],
            found.per_head[:, indices],
            found.heads,
            tuple(found.tokens[index] for index in indices),
            found.num_tokens,
            found.is_shortened,
            found.query,
            found.query_offsets,
        )

    def token_offsets(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Characters [T, 2] of the tokens of each text; safe beside ``score``."""
        with self._lock:
            found = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
                "offset_mapping"
            ]
        return [np.asarray(offsets, np.int64).reshape(-1, 2) for offsets in found]

    def show_usage(self, metrics: ServerMetrics) -> None:
        """Metrics of the store and of the recent passages, where there are any."""
        if not isinstance(self.reranker, LateReranker):
            return
        usage, recent = self.reranker.usage, self.reranker.recent
        if self.reranker.key_source is not None:
            metrics.ask(
                "headrank_store_passages_asked_total",
                "Passages looked for in the store.",
                lambda: usage.store_asked,
                "counter",
            )
            metrics.ask(
                "headrank_store_passages_found_total",
                "Passages found in the store.",
                lambda: usage.store_found,
                "counter",
            )
        metrics.ask(
            "headrank_recent_passages_asked_total",
            "Passages looked for in memory.",
            lambda: usage.recent_asked,
            "counter",
        )
        metrics.ask(
            "headrank_recent_passages_found_total", "Passages found in memory.", lambda: usage.recent_found, "counter"
        )
        metrics.ask(
            "headrank_recent_passages_bytes", "Memory that the keys of recent passages take.", lambda: recent.used_bytes
        )
        metrics.ask(
            "vllm:prefix_cache_queries", "Tokens of passages that were scored.", lambda: usage.tokens_read, "counter"
        )
        hits = "Tokens of passages whose keys were at hand."
        metrics.ask(
            "vllm:prefix_cache_hits", hits, lambda: max(0, usage.tokens_read - usage.tokens_computed), "counter"
        )

    def free_memory(self) -> None:
        """Empty the allocator's cache on a GPU, collect garbage everywhere."""
        import torch

        gc.collect()
        if self.reranker.reader.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def is_late(self) -> bool:
        """Whether a score depends on query and passage alone."""
        return isinstance(self.reranker, LateReranker)

    @property
    def room(self) -> int | None:
        """Tokens of a passage that the model reads; None where only the list as a whole is bounded."""
        return self.reranker.late.encoder.room if isinstance(self.reranker, LateReranker) else None

    @property
    def max_words(self) -> int:
        """Words of a passage that the prompt takes."""
        return self.reranker.heads.prompt.max_words

    @property
    def default_batch_tokens(self) -> int:
        """A budget that suits the device."""
        return _CPU_BATCH_TOKENS if self.reranker.reader.device.type == "cpu" else _GPU_BATCH_TOKENS

    @property
    def facts(self) -> Json:
        """What is served, without paths of this machine."""
        reranker, reader = self.reranker, self.reranker.reader
        return {
            "model_id": self.name,
            "model_sha": None,
            "model_dtype": str(next(reader.model.parameters()).dtype).removeprefix("torch."),
            "model_type": {"reranker": {"id2label": {"0": "relevance"}, "label2id": {"relevance": 0}}},
            "version": __version__,
            "method": "headrank",
            "layout": reranker.heads.prompt.document_layout,
            "is_score_relative_to_its_list": not self.is_late,
            "heads": len(reranker.heads.heads),
            "layers": {"used": reranker.layers_used, "of": reader.num_layers},
            "device": str(reader.device),
            "max_input_length": self.room,
            "relevance": None
            if self.relevance is None
            else {"kind": self.relevance.kind, "fit": dict(self.relevance.fit)},
        }


def find_relevance(settings: ServeSettings) -> RelevanceCurve | None:
    """The curve of --relevance, else that of the model's headrank.json, else none."""
    if settings.relevance is not None:
        return RelevanceCurve.from_dict(read_json(settings.relevance))
    exported = read_headrank_json(model_to_read(settings.model, settings.heads))
    if settings.heads is not None or exported is None or exported.get("relevance") is None:
        return None  # other heads give other scores: a curve belongs to its own
    return RelevanceCurve.from_dict(exported["relevance"])


def _documents(passages: Passages) -> list[dict[str, str]]:
    return [{"title": title, "text": text} for title, text in passages]
