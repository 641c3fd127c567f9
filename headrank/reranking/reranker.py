"""HeadRankReranker: rank passages by the attention of a few heads, on any Hugging Face decoder.

Shapes: B batch, K core heads, S sequence, N documents. Every method that reads attention (HeadRank, ICR, CoRe, QR, NIAH)
is this class with another HeadSet. ``rank`` and ``rank_batch`` order passages, ``score`` gives their numbers, ``explain`` where
they come from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrank.errors import InputError
from headrank.method.heads import HeadSet, head_name
from headrank.method.ordering import prompt_positions, reranking_order
from headrank.method.prompt import PromptTemplate
from headrank.method.scores import core_head_scores, scores_per_head
from headrank.method.spans import EncodedContext
from headrank.model_config import model_size
from headrank.reranking.capture import Capture
from headrank.reranking.explain import Explanation, explain_list
from headrank.reranking.exported_model import read_headrank_json
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.reader import AttentionReader
from headrank.reranking.rerank_requests import ListScores

_log = logging.getLogger(__name__)
DocumentLike = str | Mapping[str, str]


class HeadRankReranker:
    """Scores lists of passages with one truncated prefill each."""

    def __init__(self, reader: AttentionReader, heads: HeadSet, *, calibrate: bool = True, batch_size: int = 1) -> None:
        """Most callers use ``from_pretrained``."""
        heads.check_fits(reader.num_layers, reader.num_heads, reader.name)
        self.reader, self.heads, self.calibrate, self.batch_size = reader, heads, calibrate, batch_size
        self.by_layer = heads.by_layer()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        heads: HeadSet | str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompt: PromptTemplate | None = None,
        calibrate: bool = True,
        batch_size: int = 1,
        max_length: int | None = None,
    ) -> HeadRankReranker:
        """Load a model ('embedded', a directory, a hub name) with its heads.

        ``heads`` is a HeadSet, a heads.json, "all" (every head, as ICR), or None for those in the model's headrank.json.
        The prompt is the heads' own unless one is given. Layers above the deepest head are not loaded.
        """
        model = resolve_model(model)
        chosen = choose_heads(model, heads, prompt)
        chosen.check_fits(*model_size(model), str(model))
        reader = AttentionReader.load(
            model, prompt=prompt or chosen.prompt, last_layer=chosen.l_max, device=device, dtype=dtype, max_length=max_length
        )
        return cls(reader, chosen, calibrate=calibrate, batch_size=batch_size)

    @property
    def layers_used(self) -> int:
        """Layers computed for a query: l_max + 1."""
        return self.heads.l_max + 1

    def rank(
        self, query: str, documents: Sequence[DocumentLike], top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Rank ``documents`` for ``query``: [{"corpus_id", "score"(, "text")}], best first, as CrossEncoder.rank does."""
        return self.rank_batch([(query, documents)], top_k=top_k, return_documents=return_documents)[0]

    def rank_batch(
        self,
        requests: Sequence[tuple[str, Sequence[DocumentLike]]],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Rank the documents of many queries; batches are made of prompts of similar length."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k {top_k} must be at least 1")
        ranked = []
        for (_, documents), result in zip(requests, self.score_batch(requests, batch_size=batch_size), strict=True):
            order = sorted(range(len(documents)), key=lambda index: (-result.scores[index], index))[:top_k]
            rows: list[dict[str, Any]] = [{"corpus_id": index, "score": float(result.scores[index])} for index in order]
            if return_documents:
                rows = [row | {"text": documents[row["corpus_id"]]} for row in rows]
            ranked.append(rows)
        return ranked

    def score(self, query: str, documents: Sequence[DocumentLike]) -> np.ndarray:
        """The scores float32 [N] of one list, in the order its documents were given; higher is more relevant."""
        return self.score_batch([(query, documents)])[0].scores

    def score_batch(self, requests: Sequence[tuple[str, Sequence[DocumentLike]]], *, batch_size: int | None = None) -> list[ListScores]:
        """The scores of each list in the order its documents were given, with what reading it took."""
        return [results[0] for results in shared_scores([self], requests, batch_size=batch_size)]

    def _scores(self, capture: Capture) -> torch.Tensor:
        """scores_BN in prompt order: sum over core heads per token, then calibration, then sum over each document."""
        query_rows, calibration_rows = self._core_rows(capture)
        return core_head_scores(query_rows, calibration_rows, capture.layout)

    def _core_rows(self, capture: Capture) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """The core heads' rows of both branches by layer; the capture may hold other heads too, read for other rankers."""

        def chosen(rows: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
            return [_chosen(rows[layer], capture.heads_by_layer[layer], heads) for layer, heads in self.by_layer.items()]

        is_calibrated = self.calibrate and capture.layout.has_calibration
        return chosen(capture.query_rows), chosen(capture.calibration_rows) if is_calibrated else None

    def _finish(self, query: str, context: EncodedContext, order: Sequence[int], row: np.ndarray) -> ListScores:
        """Back to the order given; check the numbers; an empty document goes last."""
        scores = np.empty(len(order), np.float32)
        scores[list(order)] = row[: len(order)]
        if not np.isfinite(scores).all():
            raise InputError(f"{self.reader.name}: attention is not finite for query {query!r}; the weights hold NaN or infinity")
        empty = np.zeros(len(order), bool)
        empty[list(order)] = [first == last for first, last in context.document_spans]
        if empty.any():
            _log.warning("query %r: %d empty documents are ranked last", query, int(empty.sum()))
            scores[empty] = (scores[~empty].min() if (~empty).any() else 0.0) - 1.0
        return ListScores(scores, context.length, context.is_shortened, tuple(prompt_positions(order)))

    def explain(self, query: str, documents: Sequence[DocumentLike]) -> Explanation:
        """Per-document, per-head and per-token numbers of one list, for analyses and the token viewer."""
        pairs = titles_and_texts(documents)
        order = reranking_order(self.reader.encoder.template, pairs)
        context = self.reader.encoder.encode(query, [pairs[rank] for rank in order], keep_text=True)
        capture = self.reader.read([context], self.by_layer)
        values_KS, kept_S, per_head_KN = (
            tensor_B[0].cpu().numpy() for tensor_B in scores_per_head(*self._core_rows(capture), capture.layout)
        )
        finished = self._finish(query, context, order, per_head_KN.sum(0))
        return explain_list(context, finished, list(self.by_layer.items()), values_KS, kept_S, per_head_KN)

    def __repr__(self) -> str:
        names = ", ".join(head_name(head) for head in self.heads.heads[:8])
        depth = f"layers {self.layers_used}/{self.reader.num_layers}"
        return f"HeadRankReranker({self.reader.name!r}, {len(self.heads.heads)} heads: {names}, {depth})"


def shared_scores(
    rankers: Sequence[HeadRankReranker], requests: Sequence[tuple[str, Sequence[DocumentLike]]], *, batch_size: int | None = None
) -> list[list[ListScores]]:
    """One forward a batch for several rankers on one reader: for each request, the scores of each ranker."""
    reader = rankers[0].reader
    if any(ranker.reader is not reader for ranker in rankers):
        raise ValueError("rankers that share a forward must share the reader")
    pairs = [(query, titles_and_texts(documents)) for query, documents in requests]
    size = rankers[0].batch_size if batch_size is None else batch_size
    if size < 1:
        raise InputError(f"batch_size {size} must be at least 1")
    if not pairs:
        return []
    orders = [reranking_order(reader.encoder.template, documents) for _, documents in pairs]
    contexts = reader.encoder.encode_many(
        [(query, [documents[rank] for rank in order]) for (query, documents), order in zip(pairs, orders, strict=True)]
    )
    wanted = _union([ranker.by_layer for ranker in rankers])
    results: list[list[ListScores]] = [[] for _ in contexts]
    by_length = sorted(range(len(contexts)), key=lambda index: contexts[index].length)
    for start in range(0, len(by_length), size):
        chosen = by_length[start : start + size]
        capture = reader.read([contexts[index] for index in chosen], wanted)
        for ranker in rankers:
            scores_BN = ranker._scores(capture).cpu().numpy()
            for row, index in enumerate(chosen):
                results[index].append(ranker._finish(pairs[index][0], contexts[index], orders[index], scores_BN[row]))
    return results


def _union(wanted: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """The heads per layer that any of the rankers reads; one ranker keeps its own order."""
    union: dict[int, list[int]] = {}
    for by_layer in wanted:
        for layer, heads in by_layer.items():
            known = union.setdefault(layer, [])
            known += [head for head in heads if head not in known]
    return union


def _chosen(rows_BKS: torch.Tensor, captured: Sequence[int], heads: Sequence[int]) -> torch.Tensor:
    """The rows of ``heads`` among the captured ones."""
    if list(captured) == list(heads):
        return rows_BKS
    return rows_BKS[:, [list(captured).index(head) for head in heads]]


def choose_heads(model: str | Path, heads: HeadSet | str | Path | None, prompt: PromptTemplate | None = None) -> HeadSet:
    """Resolve what the caller gave as ``heads``: a HeadSet, a heads.json, "all", or None for the model's headrank.json."""
    if isinstance(heads, HeadSet):
        return heads
    if heads == "all":
        return HeadSet.all_heads(*model_size(model), model=str(model), prompt=prompt)
    if heads is not None:
        return HeadSet.load(heads)
    exported = read_headrank_json(model)
    if exported is None:
        raise InputError(
            f"{model}: no headrank.json beside this model; give --heads FILE, made by 'headrank select-heads' (in Python heads=)"
        )
    try:
        return HeadSet.from_dict(exported.get("heads"))
    except InputError as error:
        raise InputError(f"{model}/headrank.json: {error}; export the model again with 'headrank export-hf'") from None


def titles_and_texts(documents: Sequence[DocumentLike]) -> list[tuple[str, str]]:
    """Documents as (title, text); strings have no title. One string is not a list of documents, though Python could walk it."""
    if isinstance(documents, str) or not hasattr(documents, "__len__"):
        raise InputError(f"documents must be a list of strings or mappings, found {type(documents).__name__}: {str(documents)[:60]!r}")
    return [_title_and_text(document) for document in documents]


def _title_and_text(document: DocumentLike) -> tuple[str, str]:
    if isinstance(document, str):
        return "", document
    if isinstance(document, Mapping) and isinstance(document.get("text"), str) and isinstance(document.get("title") or "", str):
        return document.get("title") or "", document["text"]
    raise InputError(
        f"a document must be a string or a mapping with 'text' (and 'title'), found {type(document).__name__}: {str(document)[:60]!r}"
    )
