"""Whole checkpoints: Hugging Face -> Megatron and back, layer by layer, in one process or in many.

Neither direction builds a model: import hands the fused tensors to torch_dist as they are, export streams them into
safetensors. Peak memory is little more than one copy of the weights at import (divided by the processes) and about two
of the largest tensor at export.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint import load as load_tensors

from headrank.errors import InputError
from headrank.lora_settings import PROJECTIONS, LoraSettings
from headrank.reranking.peft_folder import PeftAdapter
from megatron_patches.checkpoints.files import (
    WRITE_ERRORS,
    complete_iterations,
    description,
    write_checkpoint,
    write_failure,
)
from megatron_patches.checkpoints.safetensors_files import (
    SafetensorsReader,
    plan_shards,
    shard_file_names,
    write_index,
    write_shard,
)
from megatron_patches.checkpoints.weights import mapping_of, megatron_names, read_shard, source_shape, split_sources
from megatron_patches.lora import adapter_name, adapter_parameter
from megatron_patches.shape import ModelShape

_STACKED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# on disk all experts of a layer are one tensor
_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts)\.(\d+)\.(.+)")


def import_hf(
    hf_directory: str | Path, root: str | Path, *, adapter: PeftAdapter | None = None, report: Any = iter
) -> Path:
    """Write release/ with every tensor of a Hugging Face model, bit for bit. Collective; each rank takes its share of
    the layers.

    ``adapter`` is written beside the weights, for a training of adapters that goes on from it. ``report`` wraps the
    names this rank works through, for a progress bar.
    """
    if complete_iterations(root):
        raise InputError(
            f"`output` {root}: holds checkpoints of a training run, which would go on from this model; choose "
            "another directory"
        )
    shape = ModelShape.from_hf(hf_directory)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [name for name in megatron_names(shape) if _owner(name, shape, size) == rank]
    state: dict[str, ShardedTensor] = {}
    with SafetensorsReader(hf_directory) as reader:
        for name in report(mine):
            row = mapping_of(name)
            tensor = read_shard(reader, name, shape)
            # gate and up are saved as two shards of one tensor, as Megatron does, so that TP can cut each of them
            pieces = [piece.clone() for piece in tensor.chunk(2)] if row.join == "stack" else [tensor]
            key, first, axes = _place_on_disk(name, shape)
            for index, piece in enumerate(pieces):
                offsets = [*first, *([(axes, index, len(pieces))] if len(pieces) > 1 else [])]
                state[f"{name}/{index}"] = ShardedTensor.from_rank_offsets(
                    key, piece, *offsets, prepend_axis_num=axes, allow_shape_mismatch=row.is_vocabulary
                )
    settings = None
    if adapter is not None:
        settings = adapter.settings()
        tensors = adapter_tensors(adapter, shape)
        state |= {
            name: ShardedTensor.from_rank_offsets(name, tensors[name])
            for name in tensors
            if _owner(name, shape, size) == rank
        }
    try:
        return write_checkpoint(root, "release", {"model": state}, description(shape, last_layer=None, lora=settings))
    except WRITE_ERRORS as error:
        raise InputError(
            f"`output` {root}: cannot be written ({write_failure(error)}); make room or choose another directory"
        ) from error


def _place_on_disk(name: str, shape: ModelShape) -> tuple[str, list[tuple[int, int, int]], int]:
    """The key of a tensor, and for an expert its place along an axis in front of its own."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name, [], 0
    return f"{match.group(1)}.experts.{match.group(3)}", [(0, int(match.group(2)), shape.experts)], 1


def adapter_tensors(adapter: PeftAdapter, shape: ModelShape) -> dict[str, torch.Tensor]:
    """An adapter's matrices by their names on disk; one that does not fit the model is an InputError."""
    tensors = {}
    for module, (low, high) in adapter.factors.items():
        _, layer, _, projection = module.split(".")
        weight = (high.shape[0], low.shape[1])
        if int(layer) >= shape.layers or weight != source_shape(shape, f"model.{module}.weight"):
            raise InputError(
                f"{adapter.folder}: {module!r} adapts a weight {list(weight)}, which the base model does not have there"
            )
        tensors[adapter_name(int(layer), projection, "lora_A")] = low
        tensors[adapter_name(int(layer), projection, "lora_B")] = high
    return tensors


def _owner(name: str, shape: ModelShape, size: int) -> int:
    """Which rank converts a tensor: layers in equal runs, embeddings first, the rest last."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return 0 if name.startswith("embedding") else size - 1
    return int(match.group(1)) * size // shape.layers


class CheckpointTensors:
    """Whole tensors out of a torch_dist checkpoint, whatever TP wrote it, without a process group.

    Reads our layout (a key per layer) and stock Megatron's (layers stacked along a first axis).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = CachedMetadataFileSystemReader(str(directory))
        metadata = self._reader.read_metadata().state_dict_metadata
        self._stored = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}

    def adapter(self, settings: LoraSettings) -> PeftAdapter:
        """The adapter that was trained in this checkpoint."""
        places = {name: place for name in self._stored if (place := adapter_parameter(name)) is not None}
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for name, (layer, projection, factor) in places.items():
            factors.setdefault(f"layers.{layer}.{PROJECTIONS[projection]}.{projection}", {})[factor] = self.read(name)
        pairs = {module: (pair["lora_A"], pair["lora_B"]) for module, pair in factors.items()}
        return PeftAdapter(self.directory, "", settings.alpha, is_rank_stabilised=False, factors=pairs)

    def __contains__(self, name: str) -> bool:
        return self._place(name) is not None

    def read(self, name: str) -> torch.Tensor:
        """The tensor by the name it has in a key-per-layer checkpoint."""
        place = self._place(name)
        assert place is not None, f"{name} is not in {self.directory}"
        key, layer = place
        stored = self._stored[key]
        shape = tuple(stored.size) if layer is None else (1, *stored.size[1:])
        piece = ShardedTensor(
            key=key,
            data=torch.empty(shape, dtype=stored.properties.dtype),
            dtype=stored.properties.dtype,
            local_shape=shape,
            global_shape=tuple(stored.size),
            global_offset=(layer or 0, *(0 for _ in shape[1:])),
            axis_fragmentations=None,
        )
        load_tensors({key: CheckpointableShardedTensor.from_sh_ten(piece)}, storage_reader=self._reader, no_dist=True)
        return piece.data if layer is None else piece.data[0]

    def _place(self, name: str) -> tuple[str, int | None] | None:
        """The stored key and, in a stacked checkpoint, the layer."""
        if name in self._stored:
            return name, None
        expert = _EXPERT.fullmatch(name)
        if expert and (together := f"{expert.group(1)}.experts.{expert.group(3)}") in self._stored:
            return together, int(expert.group(2))
        match = _STACKED.fullmatch(name)
        key = f"decoder.layers.{match.group(2)}" if match else name
        if match and key in self._stored and int(match.group(1)) < self._stored[key].size[0]:
            return key, int(match.group(1))
        return None


class HfTensors:
    """Every tensor of the model to export by its Hugging Face name: the checkpoint's where it has them, else the
    base's.
    """

    def __init__(
        self,
        checkpoint: CheckpointTensors,
        base: SafetensorsReader,
        shape: ModelShape,
        num_layers: int | None = None,
        adapter: PeftAdapter | None = None,
    ) -> None:
        """``num_layers`` keeps only the first layers, without the output layer, which reranking never uses.
        ``adapter`` is merged.
        """
        self.checkpoint, self.base, self.shape, self.adapter = checkpoint, base, shape, adapter
        self._origin: dict[str, str] = {}
        for name in [*megatron_names(shape), *self._query_key_names()]:
            if name in checkpoint:
                self._origin.update(dict.fromkeys(mapping_of(name).sources, name))
        names = (name if name.startswith(("model.", "lm_head.")) else f"model.{name}" for name in base.names())
        self.names = sorted((name for name in names if self._is_wanted(name, num_layers)), key=_forward_order)
        if not any(name in self._origin for name in self.names):
            raise InputError(
                f"{checkpoint.directory}: holds no weights of this model; is --base the model it was trained from?"
            )

    def layout(self, dtype: torch.dtype | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What the export will contain; ``dtype`` None keeps the base's."""
        return {name: (dtype or self.base.dtype(name), self.base.shape(name)) for name in self.names}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors one after the other; one fused Megatron tensor is in memory at a time."""
        pending = list(names)
        while pending:
            origin = self._origin.get(pending[0])
            if origin is None:
                name = pending.pop(0)
                yield name, self.base.read(name)
                continue
            parts = split_sources(mapping_of(origin), self.checkpoint.read(origin), self.shape)
            for name in [name for name in pending if name in parts]:
                pending.remove(name)
                yield name, self._merged(name, parts[name])

    def _merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 where there is an adapter; rounded when it is written."""
        if self.adapter is None or not name.endswith(".weight"):
            return tensor
        return self.adapter.merged(name.removeprefix("model.").removesuffix(".weight"), tensor)

    def _query_key_names(self) -> Iterator[str]:
        for layer in range(self.shape.layers):
            for kind in ("weight", "bias") if self.shape.has_qkv_bias else ("weight",):
                yield f"decoder.layers.{layer}.self_attention.linear_qk.{kind}"

    def _is_wanted(self, name: str, num_layers: int | None) -> bool:
        if name == "lm_head.weight":
            return num_layers is None and not self.shape.is_tied
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return match is None or num_layers is None or int(match.group(1)) < num_layers


def _forward_order(name: str) -> tuple[int, int, str]:
    """Embeddings, layers by number, the rest."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match:
        return 1, int(match.group(1)), name
    return (0 if "embed" in name else 2), 0, name


def write_weights(
    directory: Path,
    tensors: HfTensors,
    *,
    max_shard_size: int,
    dtype: torch.dtype | None = None,
    rank: int = 0,
    size: int = 1,
    report: Any = iter,
) -> int:
    """Write the safetensors files that fall to this rank, and on rank 0 the index; returns the total bytes of all
    files.

    ``report`` wraps the names this rank works through, for a progress bar.
    """
    layout = tensors.layout(dtype)
    sizes = {name: torch.Size(shape).numel() * kind.itemsize for name, (kind, shape) in layout.items()}
    shards = plan_shards(sizes, max_shard_size)
    mine = list(zip(shards, shard_file_names(len(shards)), strict=True))[rank::size]
    progress = report([name for names, _ in mine for name in names])
    for names, file_name in mine:
        parts = (
            (name, tensor.to(layout[name][0])) for (name, tensor), _ in zip(tensors.read(names), progress, strict=False)
        )
        write_shard(directory / file_name, _only(layout, names), parts)
    next(progress, None)  # a bar counts an item when the next one is asked for
    if rank == 0:
        write_index(directory, shards, sizes)
    return sum(sizes.values())


def _only(layout: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: layout[name] for name in names}
