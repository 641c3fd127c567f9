"""SwiGLU for machines without compiled fusions: silu(gate) * linear that keeps its input and nothing else for backward.

Megatron's plain way holds two more tensors of the MLP's width a layer until backward and joins the two halves of the
gradient with a copy. It stands in the slot of the activation module; on a GPU Megatron's own fusion is used.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        gate, linear = both.chunk(2, dim=-1)
        return silu(gate).mul_(linear)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (both,) = ctx.saved_tensors
        gate, linear = both.chunk(2, dim=-1)
        result = torch.empty_like(both)
        to_gate, to_linear = result.chunk(2, dim=-1)
        buffer = silu(gate)
        torch.mul(gradient, buffer, out=to_linear)
        torch.mul(gradient, linear, out=buffer)
        torch.ops.aten.silu_backward.grad_input(buffer, gate, grad_input=to_gate)
        return result


class GatedUnit(MegatronModule):
    """[..., 2 F] -> [..., F]; without parameters, but asked for its part of a sharded checkpoint all the same."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        assert config.gated_linear_unit and config.activation_func is silu, "this slot is SwiGLU's"
        assert config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0, "plain SwiGLU only"

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second."""
        return _SwiGLU.apply(both)
