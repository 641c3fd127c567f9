"""Micro-batches of contexts for one data-parallel rank: tokens, layout, pairs and reference scores, from any sample on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from data_tools.late_training_set import LateTrainingSet
from data_tools.training_set import Sample, TrainingSet
from headrank.method.attention import BranchLayout, batch_contexts
from megatron_patches.training.late_batches import LateBatch, make_late_batch
from megatron_patches.training.reference import ReferenceScores


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``samples`` keep ids for messages; ranks, pairs and references are per context, as lists differ in length."""

    samples: tuple[Sample, ...]
    input_ids_BS: torch.Tensor
    layout: BranchLayout
    ranks: tuple[torch.Tensor, ...]  # [N] each
    pairs: tuple[torch.Tensor, ...]  # [P, 2] each
    references: tuple[torch.Tensor | None, ...]  # [N] each
    teachers: tuple[torch.Tensor | None, ...]  # [N] each, NaN where the teacher gave no score

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.input_ids_BS.numel()


def make_batch(samples: tuple[Sample, ...], reference: ReferenceScores | None, device: torch.device, multiple_of: int = 1) -> Batch:
    """Pad the samples' contexts to the longest, or to the next length that ``multiple_of`` divides, and move all to the device."""
    longest = max(sample.encoded.length for sample in samples)
    pad_to = -(-longest // multiple_of) * multiple_of
    input_ids_BS, layout = batch_contexts([sample.encoded for sample in samples], device=device, pad_to=pad_to)
    return Batch(
        samples=samples,
        input_ids_BS=input_ids_BS,
        layout=layout,
        ranks=tuple(torch.from_numpy(sample.retrieval_ranks).to(device) for sample in samples),
        pairs=tuple(torch.from_numpy(sample.pairs).to(device) for sample in samples),
        teachers=tuple(None if sample.teacher is None else torch.from_numpy(sample.teacher).to(device) for sample in samples),
        references=tuple(None if reference is None else torch.from_numpy(reference.of(sample)).to(device) for sample in samples),
    )


def training_batches(
    training_set: TrainingSet | LateTrainingSet,
    reference: ReferenceScores | None,
    *,
    start: int,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    device: torch.device,
    multiple_of: int = 1,
) -> Iterator[Batch | LateBatch]:
    """This data-parallel rank's micro-batches for ever, from the ``start``-th sample of the whole job."""
    indices = training_set.shard(start, rank, world_size)
    while True:
        if isinstance(training_set, LateTrainingSet):
            late = tuple(training_set.at(next(indices)) for _ in range(micro_batch_size))
            yield make_late_batch(late, reference, device, multiple_of)
        else:
            samples = tuple(training_set.at(next(indices)) for _ in range(micro_batch_size))
            yield make_batch(samples, reference, device, multiple_of)
