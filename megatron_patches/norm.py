"""RMSNorm for layers without Transformer Engine: torch's one kernel, made where this process computes, in the model's
type.

Megatron's own wrapper of torch's norm names no device (its trainer moves the model later), ignores ``params_dtype`` and
refuses sequence parallelism. All that the latter needs is a mark: Megatron sums the gradients of marked weights over
tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patches import device


class RootMeanSquareNorm(torch.nn.RMSNorm):
    """Takes Megatron's arguments of a norm; [..., hidden] -> [..., hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        assert not config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm", "plain RMSNorm only"
        super().__init__(hidden_size, eps=eps, device=device.device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
