"""Micro-batches of the late layout: U lists as one packed sequence of opening, query branches and passages.

Shapes: U queries, N passages of all lists together, S tokens of the sequence, T tokens of the longest passage, R query
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from data_tools.late_training_set import LateSample
from headrank.method.in_batch import best_passages
from megatron_patches.late import LateRows
from megatron_patches.packed_rows import PackedRows
from megatron_patches.training.met_passages import MetPassages, passages_met
from megatron_patches.training.reference import ReferenceScores


@dataclass(frozen=True)
class LateBatch:
    """One micro-batch. Everything of a list is per list, as lists differ in length; ``lists`` are their ranges of
    passages.
    """

    samples: tuple[LateSample, ...]
    input_ids_1S: torch.Tensor
    layout: LateRows
    lists: tuple[tuple[int, int], ...]
    ranks: tuple[torch.Tensor, ...]  # [passages of the list] each
    pairs: tuple[torch.Tensor, ...]  # [P, 2] each
    references: tuple[torch.Tensor | None, ...]
    teachers: tuple[torch.Tensor | None, ...]  # NaN where the teacher gave no score
    is_best: tuple[torch.Tensor, ...]  # what the in-batch term wants to be found
    met: MetPassages

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass."""
        return self.input_ids_1S.numel()

    def met_by_all_ranks(self) -> LateBatch:
        """The same batch, whose queries meet the passages of all data-parallel ranks. Collective."""
        return replace(self, met=passages_met(self.samples, self.input_ids_1S.device, is_shared=True))


def make_late_batch(
    samples: tuple[LateSample, ...], reference: ReferenceScores | None, device: torch.device, multiple_of: int = 1
) -> LateBatch:
    """Lay out the samples' rows; the sequence is padded to a length that ``multiple_of`` divides."""
    branches, passages = (
        [sample.query.input_ids for sample in samples],
        [tokens for sample in samples for tokens in sample.passages],
    )
    opening, rows = samples[0].frame.opening_ids, [*branches, *passages]
    total = len(opening) + sum(map(len, rows))
    input_ids = np.zeros(-(-total // multiple_of) * multiple_of, np.int64)
    # the opening once, then all queries, then all passages: they share its keys instead of repeating it
    input_ids[:total] = np.concatenate([opening, *rows])
    positions = [samples[0].frame.branch_position] * len(branches) + [len(opening)] * len(passages)
    packed = PackedRows.of(len(opening), [len(tokens) for tokens in rows], positions, len(input_ids), device)
    ends = np.cumsum([len(sample.passages) for sample in samples]).tolist()
    lists = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return LateBatch(
        samples=samples,
        input_ids_1S=torch.from_numpy(input_ids)[None].to(device),
        layout=_late_rows(packed, samples, device),
        lists=lists,
        ranks=tuple(torch.from_numpy(sample.retrieval_ranks).to(device) for sample in samples),
        pairs=tuple(torch.from_numpy(sample.pairs).to(device) for sample in samples),
        references=tuple(_reference_of(sample, reference, device) for sample in samples),
        teachers=tuple(
            None if sample.teacher is None else torch.from_numpy(sample.teacher).to(device) for sample in samples
        ),
        is_best=tuple(
            best_passages(_tensor_or_none(sample.teacher), torch.from_numpy(sample.grades)).to(device)
            for sample in samples
        ),
        met=passages_met(samples, device),
    )


def _late_rows(packed: PackedRows, samples: tuple[LateSample, ...], device: torch.device) -> LateRows:
    """Which tokens of the packed rows are read; the first rows are the queries'."""
    num_queries = len(samples)
    counts = [sample.query.num_rows for sample in samples]
    tokens, first = [], 0
    index, weights = np.zeros((num_queries, max(counts)), np.int64), np.zeros((num_queries, max(counts)), np.float32)
    for number, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        tokens.append(packed.starts[number] + np.arange(sample.query.first_row, len(sample.query.input_ids)))
        index[number, :count], weights[number, :count] = first + np.arange(count), 1.0 / count
        first += count
    lengths = np.array(packed.lengths[num_queries:])
    passage_index = np.zeros((len(lengths), int(lengths.max())), np.int64)
    place_of_token, is_passage = np.zeros(len(packed.is_token_S), np.int64), np.zeros(len(packed.is_token_S), bool)
    for number, (start, length) in enumerate(zip(packed.starts[num_queries:], lengths, strict=True)):
        own = np.arange(length)
        passage_index[number, :length] = start + own
        place_of_token[start + own] = number * passage_index.shape[1] + own
        is_passage[start + own] = True
    return LateRows(
        rows=packed,
        num_queries=num_queries,
        query_tokens_Q=torch.from_numpy(np.concatenate(tokens)).to(device),
        query_index_UR=torch.from_numpy(index).to(device),
        weights_UR=torch.from_numpy(weights).to(device),
        passage_index_NT=torch.from_numpy(passage_index).to(device),
        lengths_N=torch.from_numpy(lengths).to(device),
        place_of_token_S=torch.from_numpy(place_of_token).to(device),
        is_passage_S=torch.from_numpy(is_passage).to(device),
    )


def _reference_of(sample: LateSample, reference: ReferenceScores | None, device: torch.device) -> torch.Tensor | None:
    """The frozen model's scores of the drawn passages; the cache holds those of whole lists."""
    if reference is None:
        return None
    # references are kept for the whole list; a sample shows some of its passages
    return torch.from_numpy(reference.of_list(sample.context_id, len(sample.list_digests))[sample.places]).to(device)


def _tensor_or_none(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)
