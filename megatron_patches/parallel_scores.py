"""The only module with collectives of ours: scores over tensor-parallel shards, and the loop's few numbers.

Shapes: B batch, S sequence, N documents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from headrank.method import scores
from headrank.method.attention import BranchLayout
from megatron_patches.model import CapturedRows


def core_head_scores(
    captured: CapturedRows,
    layout: BranchLayout,
    *,
    is_calibrated: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Document scores [B, N]: core heads summed over layers and ranks, calibrated where the layout has the branch.

    Sharded before: each rank holds the rows of its own core heads. Replicated after: the scores. The formula is the one
    of inference; two all-reduces make it a sum over ranks, of the token differences [B, S] and of the scores [B, N].
    Sum forward, identity backward, since every rank computes the same loss from the same scores. Without calibration
    only the second happens.
    """
    group = group or parallel_state.get_tensor_model_parallel_group()

    def over_ranks(values: torch.Tensor) -> torch.Tensor:
        return sum_over_tensor_parallel(values, group)

    is_calibrated = layout.has_calibration if is_calibrated is None else is_calibrated
    query_rows = [rows.query_rows for rows in captured.rows.values()]
    calibration_rows = [rows.calibration_rows for rows in captured.rows.values() if rows.calibration_rows is not None]
    return scores.core_head_scores(query_rows, calibration_rows if is_calibrated else None, layout, over_ranks)


def sum_over_tensor_parallel(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of every tensor-parallel rank's part. Different before, the same after; sum forward, identity
    backward.
    """
    group = group or parallel_state.get_tensor_model_parallel_group()
    # contiguous and fresh: Megatron reduces in place, and loses the result of a tensor that is not contiguous
    return tensor_parallel.reduce_from_tensor_model_parallel_region(values.contiguous().clone(), group=group)


def sum_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """The sum of every data-parallel rank's numbers, in place. Different before, the same on all of them after; no
    gradient.
    """
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def gather_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """[ranks, ...] of every data-parallel rank's ``values`` (of one shape), in rank order. Different before, the same
    after.

    Differentiable: what all ranks' losses say of a rank's values comes back to it, summed. DDP's mean over ranks then
    makes the gradient that of the mean loss, as with every other term.
    """
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return values[None]
    gathered: torch.Tensor = _Gather.apply(values.contiguous(), group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        # not a reduce-scatter, which gloo lacks; a clone, because autograd may give the same tensor to others
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def largest_on_any_rank(values: torch.Tensor) -> torch.Tensor:
    """Element by element the largest of all ranks, in place: what one rank noticed, all know. Different before, the
    same after.
    """
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def gather_from_all(value: Any) -> list[Any]:
    """Every rank's plain Python value, in rank order, on every rank; for small things that happen rarely. Alone
    without a group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
