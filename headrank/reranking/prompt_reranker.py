"""Reranking by lists that stand in one prompt: one truncated prefill a list, in the sequential or the parallel layout.

HeadRank, ICR, CoRe, QR and NIAH are this class with another HeadSet. Without a readout the score is the paper's:
masses, calibrated, with equal weights.

Shapes: B batch, K heads, S sequence, N documents, R query rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from headrank.method.heads import HeadSet
from headrank.method.log_mass import head_values
from headrank.method.ordering import prompt_positions, reranking_order
from headrank.method.readout import weighted_sum
from headrank.method.scores import core_head_scores, scores_per_head, sum_over_documents
from headrank.method.spans import EncodedContext, PromptEncoder
from headrank.reranking.capture import Capture
from headrank.reranking.explain import Explanation, explain_list
from headrank.reranking.reader import AttentionReader
from headrank.reranking.rerank_requests import ListScores
from headrank.reranking.reranker import (
    DocumentLike,
    HeadRankReranker,
    checked_requests,
    titles_and_texts,
    with_empty_last,
)


class PromptReranker(HeadRankReranker):
    """Scores lists of passages with one truncated prefill each."""

    def __init__(
        self, reader: AttentionReader, heads: HeadSet, *, calibrate: bool = True, batch_size: int | None = None
    ) -> None:
        """Most callers use ``HeadRankReranker.from_pretrained``."""
        super().__init__(reader, heads, 1 if batch_size is None else batch_size)
        readout = heads.readout
        self.is_log_mass = readout is not None and readout.kind == "log-mass"
        self.calibrate = calibrate and (readout is None or readout.is_calibrated)
        self.encoder = reader.encoder
        if self.is_log_mass:  # nothing to calibrate, so the branch is not even computed
            self.encoder = PromptEncoder(
                reader.tokenizer, reader.encoder.template, reader.encoder.max_length, calibrate=False
            )
        places = [heads.heads.index((layer, head)) for layer, chosen in self.by_layer.items() for head in chosen]
        # the paper's score has no weights: multiplying by one would be the same number, and one more operation
        self._weights_K = _in_order(readout.weights, places, reader.device) if readout is not None else None
        self._offsets_K = (
            _in_order(readout.offsets, places, reader.device) if readout is not None and readout.offsets else None
        )

    def score_batch(
        self, requests: Sequence[tuple[str, Sequence[DocumentLike]]], *, batch_size: int | None = None
    ) -> list[ListScores]:
        """The scores of each list in the order its documents were given, with what reading it took."""
        return [results[0] for results in shared_scores([self], requests, batch_size=batch_size)]

    def _scores(self, capture: Capture) -> torch.Tensor:
        """scores_BN in prompt order: sum over heads per token, then calibration, then sum over each document; or the
        log masses.
        """
        if self.is_log_mass:
            assert self._weights_K is not None
            return weighted_sum(self._head_values(capture), self._weights_K)
        query_rows, calibration_rows = self._core_rows(capture)
        return core_head_scores(query_rows, calibration_rows, capture.layout)

    def _head_values(self, capture: Capture) -> torch.Tensor:
        """The log-mass s_h of each document before the weights [B, N, K]; an empty document's are 0."""
        layers = [
            _chosen(capture.log_ratios[layer], capture.heads_by_layer[layer], heads, axis=2)
            for layer, heads in self.by_layer.items()
        ]
        assert self.heads.readout is not None
        return head_values(torch.cat(layers, dim=2), capture.layout, self._offsets_K, self.heads.readout.floor)

    def _core_rows(self, capture: Capture) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """The heads' rows of both branches by layer, weighted; the capture may hold other heads too, read for other
        rankers.
        """

        def chosen(rows: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
            layers = [
                _chosen(rows[layer], capture.heads_by_layer[layer], heads, axis=1)
                for layer, heads in self.by_layer.items()
            ]
            if self._weights_K is None:
                return layers
            weights = self._weights_K.split([len(heads) for heads in self.by_layer.values()])
            return [rows_BKS * weights_K[:, None] for rows_BKS, weights_K in zip(layers, weights, strict=True)]

        is_calibrated = self.calibrate and capture.layout.has_calibration
        return chosen(capture.query_rows), chosen(capture.calibration_rows) if is_calibrated else None

    def _finish(self, query: str, context: EncodedContext, order: Sequence[int], row: np.ndarray) -> ListScores:
        """Back to the order given; check the numbers; an empty document goes last."""
        scores, empty = np.empty(len(order), np.float32), np.zeros(len(order), bool)
        # back to the order in which the documents were given; a shorter list of the batch ends before the row does
        scores[list(order)] = row[: len(order)]
        empty[list(order)] = [first == last for first, last in context.document_spans]
        scores = with_empty_last(scores, empty, query, self.reader.name)
        return ListScores(scores, context.length, context.is_shortened, tuple(prompt_positions(order)))

    def explain(self, query: str, documents: Sequence[DocumentLike]) -> Explanation:
        """Per-document, per-head and per-token numbers of one list, for analyses and the token viewer.

        A head's log mass has no parts; each token is shown with the part of it that it has of the head's mass on the
        document.
        """
        pairs = titles_and_texts(documents)
        order = reranking_order(self.encoder.template, pairs)
        context = self.encoder.encode(query, [pairs[rank] for rank in order], keep_text=True)
        capture = self.reader.read(
            [context], self.by_layer, reads=("mass", "log-mass") if self.is_log_mass else ("mass",)
        )
        parts = (
            self._log_mass_parts(capture)
            if self.is_log_mass
            else scores_per_head(*self._core_rows(capture), capture.layout)
        )
        values_KS, kept_S, per_head_KN = (tensor_B[0].cpu().numpy() for tensor_B in parts)
        finished = self._finish(query, context, order, per_head_KN.sum(0))
        return explain_list(context, finished, list(self.by_layer.items()), values_KS, kept_S, per_head_KN)

    def _log_mass_parts(self, capture: Capture) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token values [B, K, S], the mask of those that count [B, S], weighted values of heads [B, K, N]."""
        assert self._weights_K is not None
        layout = capture.layout
        per_head_BKN = (self._head_values(capture) * self._weights_K).transpose(1, 2)
        rows_BKS = torch.cat([capture.query_rows[layer] for layer in self.by_layer], dim=1)
        # a head that does not look at a document at all would divide by zero
        masses_BKN = sum_over_documents(rows_BKS, layout.document_of_token_BS, layout.num_documents).clamp_min(1e-30)
        factor_BKN = torch.nn.functional.pad(per_head_BKN / masses_BKN, (0, 1))  # tokens of no document get 0
        values_BKS = rows_BKS * factor_BKN.gather(2, layout.document_of_token_BS[:, None].expand(rows_BKS.shape))
        return values_BKS, torch.ones_like(values_BKS[:, 0], dtype=torch.bool), per_head_BKN


def shared_scores(
    rankers: Sequence[HeadRankReranker],
    requests: Sequence[tuple[str, Sequence[DocumentLike]]],
    *,
    batch_size: int | None = None,
) -> list[list[ListScores]]:
    """One forward per batch for several rankers on one reader: for each request, the scores of each ranker.

    Late rankers have no forward of a list to share; each computes its own keys.
    """
    reader = rankers[0].reader
    if any(ranker.reader is not reader for ranker in rankers):
        raise ValueError("rankers that share a forward must share the reader")
    by_prompt = [ranker for ranker in rankers if isinstance(ranker, PromptReranker)]
    if len(by_prompt) < len(rankers):
        # prompt rankers among late ones lose the shared forward: mixing the two is rare and has no common batch
        each = [ranker.score_batch(requests, batch_size=batch_size) for ranker in rankers]
        return [list(results) for results in zip(*each, strict=True)]
    pairs, size = checked_requests(requests, rankers[0].batch_size if batch_size is None else batch_size)
    if not pairs:
        return []
    # with calibration if any ranker needs it; log masses are not changed by the branch, which their rows do not see
    encoder = next((ranker.encoder for ranker in by_prompt if not ranker.is_log_mass), by_prompt[0].encoder)
    orders = [reranking_order(encoder.template, documents) for _, documents in pairs]
    contexts = encoder.encode_many(
        [(query, [documents[rank] for rank in order]) for (query, documents), order in zip(pairs, orders, strict=True)]
    )
    wanted = _union([ranker.by_layer for ranker in rankers])
    reads = {"log-mass" if ranker.is_log_mass else "mass" for ranker in by_prompt}
    results: list[list[ListScores]] = [[] for _ in contexts]
    # lists of similar length share a batch: padding is computed like any token
    by_length = sorted(range(len(contexts)), key=lambda index: contexts[index].length)
    for start in range(0, len(by_length), size):
        chosen = by_length[start : start + size]
        capture = reader.read([contexts[index] for index in chosen], wanted, reads=reads)
        for ranker in by_prompt:
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


def _chosen(rows: torch.Tensor, captured: Sequence[int], heads: Sequence[int], axis: int) -> torch.Tensor:
    """The entries of ``heads`` among the captured ones, which lie along ``axis``."""
    if list(captured) == list(heads):
        return rows
    places = torch.tensor([list(captured).index(head) for head in heads], device=rows.device)
    return rows.index_select(axis, places)


def _in_order(values: Sequence[float], places: Sequence[int], device: torch.device) -> torch.Tensor:
    """One number per head, from the order of the file to that of the layers."""
    return torch.tensor([values[place] for place in places], dtype=torch.float32, device=device)
