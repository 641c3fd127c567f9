"""Trained readout weights, sharded by head: what training adds to the weights of heads.json.

The parameter is the difference, not the weight: in bf16 a weight would lose digits that a signed sum of large log
masses needs, a small difference loses nothing that matters. It is a table over all layers and heads, zero where no head
is read, so that it is cut over ranks as evenly as the heads themselves and a checkpoint loads at any tensor-parallel
size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from headrank.method.heads import HeadSet
from megatron_patches import device

PARAMETER = "readout.delta"  # its name in the model and in checkpoints


class ReadoutDelta(MegatronModule):
    """delta [layers, heads on this rank], zero at the start."""

    def __init__(self, config: TransformerConfig, num_layers: int, num_heads_on_rank: int, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        zeros = torch.zeros(num_layers, num_heads_on_rank, dtype=config.params_dtype, device=device.device())
        self.delta = torch.nn.Parameter(zeros)
        set_tensor_model_parallel_attributes(self.delta, is_parallel=True, dim=1, stride=1)

    def forward(self) -> torch.Tensor:
        """The table in float32. A call, so that Megatron's hooks see that it is needed."""
        return self.delta.float()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:  # Megatron's signature
        """Cut along heads; data-parallel ranks hold copies, of which one is written."""
        # without the data-parallel group every copy would call itself the first, and Megatron refuse to save
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            {"delta": self.delta}, prefix, {"delta": 1}, sharded_offsets, **groups
        )


def with_trained_weights(heads: HeadSet, delta_LH: torch.Tensor) -> HeadSet:
    """The heads with their readout's weights plus the trained difference."""
    assert heads.readout is not None, "only a readout has weights"
    pairs = zip(heads.heads, heads.readout.weights, strict=True)
    weights = tuple(weight + float(delta_LH[layer, head]) for (layer, head), weight in pairs)
    trained = dict(zip(heads.heads, weights, strict=True))
    table = tuple({**row, "weight": trained.get((row["layer"], row["head"]), row.get("weight"))} for row in heads.table)
    fit = {**heads.readout.fit, "then": "trained with the model (--headrank-train-readout)"}
    return dataclasses.replace(heads, readout=dataclasses.replace(heads.readout, weights=weights, fit=fit), table=table)
