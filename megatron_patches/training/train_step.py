"""One optimizer step: forward and backward through Megatron's schedule function, then a guarded update.

Shapes: B contexts of a micro-batch, N documents. Every tensor-parallel rank computes the same loss from the same
replicated scores_BN; the schedule divides by the number of micro-batches and DDP averages over data-parallel ranks, so
the gradient is that of the mean over the global batch whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from headrank.method.heads import HeadSet
from headrank.method.loss_settings import LossSettings
from headrank.method.losses import LossTerms, headrank_loss
from megatron_patches.parallel_scores import core_head_scores, sum_over_data_parallel, sum_over_tensor_parallel
from megatron_patches.prompt_log_mass import rank_scores, with_empty_last
from megatron_patches.training.batches import Batch
from megatron_patches.training.late_batches import LateBatch
from megatron_patches.training.late_step import late_losses, rank_readout, score_late_batch

TERMS = (*(field.name for field in fields(LossTerms)), "contrast")  # the order of a metrics vector


@dataclass(frozen=True)
class StepResult:
    """What one step did. ``terms`` are means over the global batch; ``bad_queries`` is filled when the loss was not
    finite.
    """

    terms: dict[str, float]
    grad_norm: float
    is_updated: bool
    num_tokens: int  # on this rank
    bad_queries: tuple[str, ...] = field(default=())


def score_batch(
    model: torch.nn.Module, batch: Batch | LateBatch, heads: HeadSet, *, is_in_batch: bool = False
) -> torch.Tensor:
    """scores_BN of a micro-batch: calibrated masses summed over the core heads of all tensor-parallel ranks, or what a
    readout makes.

    In the late layout the scores of each list's own passages or, with ``is_in_batch``, of all passages that they meet.
    """
    if isinstance(batch, LateBatch):
        return score_late_batch(model, batch, heads, is_in_batch=is_in_batch)
    if heads.readout is not None:
        captured = model(batch.input_ids_BS, batch.layout, heads.by_layer(), is_log_mass=True)
        readout = rank_readout(model, heads, batch.input_ids_BS.device)
        return with_empty_last(sum_over_tensor_parallel(rank_scores(readout, captured, batch.layout)), batch.layout)
    captured = model(batch.input_ids_BS, batch.layout, heads.by_layer())
    return core_head_scores(captured, batch.layout)


def batch_loss(
    scores_BN: torch.Tensor, batch: Batch | LateBatch, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of L_total over the contexts of a micro-batch, and the detached mean of every term in the order of
    TERMS.
    """
    if isinstance(batch, LateBatch):
        terms, contrasts = zip(*late_losses(scores_BN, batch, settings), strict=True)
    else:
        terms = context_losses(scores_BN, batch, settings)
        contrasts = (scores_BN.new_zeros(()),) * len(terms)
    # mean over contexts and not over pairs: a list with four hundred pairs must not outvote a list with ten
    totals = [term.total + contrast for term, contrast in zip(terms, contrasts, strict=True)]
    # A copy, because the schedule divides the returned loss in place.
    rows = [
        [total, *(getattr(term, name) for name in TERMS[1:-1]), contrast]
        for total, term, contrast in zip(totals, terms, contrasts, strict=True)
    ]
    return torch.stack(totals).mean(), torch.stack(
        [torch.stack([value.detach().float() for value in row]) for row in rows]
    ).mean(dim=0)


def context_losses(scores_BN: torch.Tensor, batch: Batch, settings: LossSettings) -> tuple[LossTerms, ...]:
    """The terms of each context of a padded batch."""
    return tuple(
        headrank_loss(scores_BN[row, : len(ranks)], reference, ranks, pairs, settings, teacher)
        for row, (ranks, pairs, reference, teacher) in enumerate(
            zip(batch.ranks, batch.pairs, batch.references, batch.teachers, strict=True)
        )
    )


def forward_step(
    data: Iterator[Batch | LateBatch], model: torch.nn.Module, heads: HeadSet, settings: LossSettings
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, dict[str, Any]]]]:
    """Megatron's forward-step protocol: the scores and a function from scores to (loss, report)."""
    batch = next(data)
    if settings.in_batch_weight > 0 and isinstance(batch, LateBatch):
        batch = batch.met_by_all_ranks()
    scores = score_batch(model, batch, heads, is_in_batch=settings.in_batch_weight > 0)
    return scores, partial(_loss_and_report, batch=batch, settings=settings)


def _loss_and_report(
    scores_BN: torch.Tensor, *, batch: Batch | LateBatch, settings: LossSettings
) -> tuple[torch.Tensor, dict[str, Any]]:
    total, values = batch_loss(scores_BN, batch, settings)
    query_ids = tuple(sample.query_id for sample in batch.samples)
    return total, {"values": values, "query_ids": query_ids, "num_tokens": batch.num_tokens}


def train_step(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    data: Iterator[Batch | LateBatch],
    heads: HeadSet,
    settings: LossSettings,
    num_microbatches: int,
) -> StepResult:
    """Forward and backward over the global batch, then the update unless a loss or a gradient is not finite."""
    # both: Megatron keeps gradients in a buffer of its own, which optimizer.zero_grad() does not touch
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, heads=heads, settings=settings),
        data_iterator=data,
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=1,  # unused without pipelining
        micro_batch_size=1,
        forward_only=False,
    )
    values = torch.stack([report["values"] for report in reports]).mean(dim=0)
    # reduced before anyone looks at it: every rank must see the same number, or some would step and others skip
    values = sum_over_data_parallel(values) / parallel_state.get_data_parallel_world_size()
    terms = dict(zip(TERMS, values.tolist(), strict=True))
    timers = unwrap_model(model).config.timers
    if timers is not None:
        timers("optimizer", log_level=1).start()
    is_updated, grad_norm = guarded_update(optimizer, is_loss_finite=math.isfinite(terms["total"]))
    if timers is not None:
        timers("optimizer").stop()
    bad: tuple[str, ...] = ()
    if not is_updated:
        # where only the gradient is not finite, any query of the step may have done it
        culprits = [report for report in reports if not math.isfinite(float(report["values"][0]))]
        bad = tuple(query_id for report in culprits or reports for query_id in report["query_ids"])
    return StepResult(terms, grad_norm, is_updated, sum(report["num_tokens"] for report in reports), bad)


@torch.no_grad()
def guarded_update(optimizer: MegatronOptimizer, is_loss_finite: bool) -> tuple[bool, float]:
    """Clip and step as Megatron's ``optimizer.step`` does, but leave weights and moments alone when the norm is not
    finite.

    Loss and norm are already reduced over all ranks, so every rank takes the same branch. Returns (updated, gradient
    norm).
    """
    # before the norm: with the distributed optimizer the gradients reach its shards here
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not is_loss_finite or not math.isfinite(grad_norm):
        return False, grad_norm
    # by the whole norm for each part: clipping a part by its own norm would change the step's direction
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
    return bool(optimizer.step_with_ready_grads()), grad_norm
