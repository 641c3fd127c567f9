"""FlexAttention as the planner sees it: one kernel that works through the visible tiles and keeps Q, K, V, context and
log sums.

Eager FlexAttention would make S x S matrices, and its compiled kernel needs a GPU. Shapes as in
headrank.method.flexible_attention.
"""

from __future__ import annotations

from typing import Any

import torch

from headrank.method.flexible_attention import TILE, FlexibleMask
from megatron_patches.planner.meter import FLOP_FORMULAS


@torch.library.custom_op("headrank::tiled_attention", mutates_args=())
def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context and log sums over ``pairs`` query-key pairs of each head; shapes only."""
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("headrank::tiled_attention_backward", mutates_args=())
def tiled_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    log_sums: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q, K and V; shapes only."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


tiled_attention.register_fake(tiled_attention._init_fn)
tiled_attention_backward.register_fake(tiled_attention_backward._init_fn)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.pairs = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *tiled_attention_backward(gradient, *ctx.saved_tensors, ctx.pairs), None


tiled_attention.register_autograd(_backward, setup_context=_keep)


def attend_to_tiles(
    mask: FlexibleMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids_BS: Any,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """In the place of FlexibleMask.attend."""
    return tiled_attention(query, key, value, mask.num_visible * TILE * TILE)[0]


def _forward_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int, **_: Any) -> int:
    """QK^T and PV; ``pairs`` are already summed over the batch."""
    return 2 * query.shape[1] * pairs * (query.shape[-1] + value.shape[-1])


def _backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **_: Any
) -> int:
    """QK^T again, dV, dP, dQ, dK."""
    return 2 * query.shape[1] * rest[-1] * (3 * query.shape[-1] + 2 * value.shape[-1])


FLOP_FORMULAS[torch.ops.headrank.tiled_attention] = _forward_flops
FLOP_FORMULAS[torch.ops.headrank.tiled_attention_backward] = _backward_flops
