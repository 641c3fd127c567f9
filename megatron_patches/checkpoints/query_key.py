"""Reading the last layer of a truncated model, which has Q and K alone, from a checkpoint that has its whole
linear_qkv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory

from megatron_patches.model import HeadRankModel


def take_query_key_from_full(
    wanted: ShardedStateDict, model: HeadRankModel, stored: Mapping[str, ShardedTensor]
) -> None:
    """Where the checkpoint has the whole linear_qkv of the last layer, read its query and key rows, group by group."""
    for name, entry in wanted.items():
        full_key = entry.key.replace(".linear_qk.", ".linear_qkv.")
        if ".linear_qk." in entry.key and entry.key not in stored and full_key in stored:
            wanted[name] = _query_key_factory(entry, full_key, stored[full_key].global_shape, model)


def _query_key_factory(
    entry: ShardedTensor, full_key: str, full_shape: tuple[int, ...], model: HeadRankModel
) -> ShardedTensorFactory:
    num_groups = model.shape.groups // model.tp_group.size()
    first_group = model.tp_group.rank() * num_groups
    rows = full_shape[0] // model.shape.groups  # of one group: its queries, its key, its value

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor(
                key=key,
                data=piece,
                dtype=piece.dtype,
                local_shape=tuple(piece.shape),
                global_shape=full_shape,
                global_offset=((first_group + index) * rows, *(0 for _ in full_shape[1:])),
                axis_fragmentations=None,
                replica_id=replica_id,
            )
            for index, piece in enumerate(tensor.detach().unflatten(0, (num_groups, -1)).unbind(0))
        ]

    return ShardedTensorFactory(full_key, entry.data, build, torch.cat, entry.replica_id)
