"""Micro-batches of contexts for one data-parallel rank: tokens, layout, pairs and reference scores, from any sample
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig

from data_tools.late_training_set import LateTrainingSet
from data_tools.training_set import Sample, TrainingSet
from headrank.method.attention import BranchLayout, batch_contexts
from headrank.method.transfer import together_on
from megatron_patches import device
from megatron_patches.kernels import LENGTH_STEP
from megatron_patches.training.late_batches import LateBatch, make_late_batch
from megatron_patches.training.reference import ReferenceScores


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``samples`` keep ids for messages; ranks, pairs and references are per context, as lists
    differ in length.
    """

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


def length_multiple(config: TransformerConfig) -> int:
    """What must divide the length of a batch: sequence parallelism splits it over the tensor-parallel ranks; on a GPU
    64 as well.

    With --tp-comm-overlap it is the longest length itself, and all batches are as long.
    """
    if config.tp_comm_overlap:
        return config.fixed_length  # type: ignore[attr-defined,no-any-return]
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(parts, LENGTH_STEP) if device.has_cuda() else parts


def make_batch(
    samples: tuple[Sample, ...], reference: ReferenceScores | None, where: torch.device, multiple_of: int = 1
) -> Batch:
    """Pad the samples' contexts to the longest, or to the next length that ``multiple_of`` divides, and move all to
    the device.
    """
    longest = max(sample.encoded.length for sample in samples)
    pad_to = -(-longest // multiple_of) * multiple_of
    encoded = [sample.encoded for sample in samples]
    input_ids_BS, layout = batch_contexts(encoded, device=where, pad_to=pad_to, is_flexible=device.has_cuda())
    references = [None if reference is None else reference.of(sample) for sample in samples]
    per_sample = [
        values
        for sample, scores in zip(samples, references, strict=True)
        for values in (sample.retrieval_ranks, sample.pairs, sample.teacher, scores)
    ]
    # one copy to the device for everything: a hundred small ones would each wait for the host
    moved = iter(together_on(where, [values for values in per_sample if values is not None]))
    rows = [None if values is None else next(moved) for values in per_sample]
    return Batch(
        samples=samples,
        input_ids_BS=input_ids_BS,
        layout=layout,
        ranks=tuple(rows[0::4]),  # type: ignore[arg-type]
        pairs=tuple(rows[1::4]),  # type: ignore[arg-type]
        teachers=tuple(rows[2::4]),
        references=tuple(rows[3::4]),
    )


def training_batches(
    training_set: TrainingSet | LateTrainingSet,
    reference: ReferenceScores | None,
    *,
    start: int,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    where: torch.device,
    multiple_of: int = 1,
) -> Iterator[Batch | LateBatch]:
    """This data-parallel rank's micro-batches for ever, from the ``start``-th sample of the whole job."""
    # counted in samples and not in steps: a resumed run may have another number of ranks and still goes on where it
    # stopped
    indices = training_set.shard(start, rank, world_size)
    while True:
        if isinstance(training_set, LateTrainingSet):
            late = tuple(training_set.at(next(indices)) for _ in range(micro_batch_size))
            yield make_late_batch(late, reference, where, multiple_of)
        else:
            samples = tuple(training_set.at(next(indices)) for _ in range(micro_batch_size))
            yield make_batch(samples, reference, where, multiple_of)
