"""A Megatron checkpoint as a finished Hugging Face directory: weights, configuration, tokenizer, headrank.json, model
card.

Adapters are merged into the weights, or are all that is written (``is_adapter_only``): then it is a PEFT folder.

Everything is written under a hidden name beside the output and renamed at the very end, configuration last, so that an
interrupted export leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from headrank.artifacts import hidden_beside
from headrank.errors import InputError
from headrank.files import put_in_place
from headrank.lora_settings import LoraSettings
from headrank.method.heads import HeadSet
from headrank.provenance import versions
from headrank.reranking.exported_model import (
    check_output,
    check_prompt,
    copy_companions,
    write_failed,
    write_headrank_files,
)
from headrank.reranking.peft_folder import WEIGHTS_NAME, PeftAdapter, write_adapter
from megatron_patches.checkpoints.conversion import CheckpointTensors, HfTensors, write_weights
from megatron_patches.checkpoints.damage import require_undamaged
from megatron_patches.checkpoints.files import checkpoint_directory
from megatron_patches.checkpoints.safetensors_files import SafetensorsReader
from megatron_patches.readout_weights import PARAMETER, with_trained_weights
from megatron_patches.shape import ModelShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """What to export. ``heads`` None takes the set stored with the checkpoint; a full export can also do without
    any.
    """

    checkpoint: Path
    base: Path
    output: Path
    base_name: str
    name: str
    loadable_base: str = ""  # of an adapter: what its folder finds the base model by
    heads: HeadSet | None = None
    is_truncated: bool = False
    is_adapter_only: bool = False
    max_shard_size: int = 5 * 10**9
    dtype: torch.dtype | None = None
    can_overwrite: bool = False


def export_hf(request: ExportRequest, *, report: Any = iter) -> HeadSet | None:
    """Write the directory on all ranks together and return the heads that went into it."""
    directory = checkpoint_directory(request.checkpoint)
    # before anything is written: a damaged checkpoint would become a model that loads
    require_undamaged(directory)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    about = common.get("headrank", {})
    shape = ModelShape.from_hf(request.base)
    _check_same_model(directory, about, shape, request.base)
    heads = request.heads or _stored_heads(about)
    checkpoint = CheckpointTensors(directory)
    if heads is not None and request.heads is None and PARAMETER in checkpoint:
        heads = with_trained_weights(heads, checkpoint.read(PARAMETER))
    if heads is not None:
        heads.check_fits(shape.layers, shape.heads, str(request.base))
        check_prompt(heads, _stored_heads(about), str(directory))
    elif request.is_truncated:
        raise InputError(
            f"`truncate`: {directory} has no heads stored with it, so the depth is not known; give a heads.json "
            "with `heads`"
        )
    settings = LoraSettings.from_dict(about.get("lora"))
    adapter = None if settings is None else checkpoint.adapter(settings)
    if request.is_adapter_only:
        if adapter is None or settings is None:
            raise InputError(f"`adapter_only`: {directory} holds no adapters (its training had none); leave it out")
        with _finished_directory(request) as partial:
            if dist.get_rank() == 0:  # a few megabytes
                _write_adapter_folder(partial, request, adapter, settings, heads, training_facts(common, about))
        return heads
    num_layers = heads.l_max + 1 if heads is not None and request.is_truncated else None
    with SafetensorsReader(request.base) as base, _finished_directory(request) as partial:
        tensors = HfTensors(checkpoint, base, shape, num_layers, adapter)
        rank, size = dist.get_rank(), dist.get_world_size()
        num_bytes = write_weights(
            partial,
            tensors,
            max_shard_size=request.max_shard_size,
            dtype=request.dtype,
            rank=rank,
            size=size,
            report=report,
        )
        dist.barrier()
        if rank == 0:
            _check_written(partial, tensors, request.dtype)
            copy_companions(request.base, partial, can_generate=not request.is_truncated)
            facts = training_facts(common, about)
            if heads is not None:
                write_headrank_files(
                    partial,
                    heads,
                    facts,
                    name=request.name,
                    base=request.base,
                    base_name=request.base_name,
                    is_truncated=request.is_truncated,
                    num_bytes=num_bytes,
                )
            _write_config(request, partial, shape, num_layers)
    return heads


def _write_adapter_folder(
    partial: Path,
    request: ExportRequest,
    adapter: PeftAdapter,
    settings: LoraSettings,
    heads: HeadSet | None,
    facts: Mapping[str, Any],
) -> None:
    """adapter_config.json and adapter_model.safetensors; with heads also headrank.json and the card."""
    factors = {
        name: (low.to(request.dtype or low.dtype), high.to(request.dtype or high.dtype))
        for name, (low, high) in adapter.factors.items()
    }
    write_adapter(partial, factors, settings, base_name=request.base_name)
    if heads is not None:
        write_headrank_files(
            partial,
            heads,
            facts,
            name=request.name,
            base=request.base,
            base_name=request.base_name,
            adapted=request.loadable_base,
            num_bytes=(partial / WEIGHTS_NAME).stat().st_size,
        )


def training_facts(common: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint knows about its making, without this machine's paths."""
    extra = about.get("extra", {})
    facts = {"iteration": common.get("iteration", 0), "last_layer": about.get("last_layer")}
    facts |= {key: value for key, value in extra.items() if key != "heads"}
    return _without_paths({**facts, "versions": versions()})


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items() if not _is_path(item)}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value if not _is_path(item)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and os.path.isabs(value)


def _stored_heads(about: Mapping[str, Any]) -> HeadSet | None:
    stored = about.get("extra", {}).get("heads")
    return None if stored is None else HeadSet.from_dict({"table": [], **stored})


def _check_same_model(directory: Path, about: Mapping[str, Any], shape: ModelShape, base: Path) -> None:
    """Upper layers come from the base, so it must be the model that was trained."""
    for name, value in about.get("shape", {}).items():
        if name != "max_positions" and asdict(shape).get(name) != value:
            raise InputError(
                f"`base` {base}: {name} is {asdict(shape).get(name)!r}, but {directory} was trained from a model "
                f"with {value!r}"
            )


@contextlib.contextmanager
def _finished_directory(request: ExportRequest) -> Iterator[Path]:
    """A hidden sibling of the output that takes its name on success and vanishes on failure. Collective."""
    is_first, partial = dist.get_rank() == 0, hidden_beside(request.output)
    check_output(request.output, request.can_overwrite, {"`checkpoint`": request.checkpoint, "`base`": request.base})
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        yield partial
    except BaseException as error:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write, not of a name
            raise write_failed(request.output, error) from error
        raise
    if is_first:
        put_in_place(partial, request.output)
    dist.barrier()


def _check_written(partial: Path, tensors: HfTensors, dtype: torch.dtype | None) -> None:
    """Read every header back: a disk that filled up silently must not become a model."""
    with SafetensorsReader(partial) as written:
        for name, (kind, size) in tensors.layout(dtype).items():
            if name not in written or written.shape(name) != size or written.dtype(name) != kind:
                raise InputError(f"{partial}: tensor {name!r} was not written as planned; is the disk full?")


def _write_config(request: ExportRequest, partial: Path, shape: ModelShape, num_layers: int | None) -> None:
    """The base's configuration; a truncated model is a bare decoder of fewer layers that knows how deep its source
    was.
    """
    config = json.loads((request.base / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = shape.is_tied
    if request.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = str(request.dtype).removeprefix("torch.")
    if num_layers is not None:
        for key, value in config.items():
            if isinstance(value, list) and len(value) == shape.layers and key != "architectures":
                config[key] = value[:num_layers]
        config["num_hidden_layers"] = num_layers
        config["headrank_source_layers"] = shape.layers
        config["architectures"] = [name.replace("ForCausalLM", "Model") for name in config.get("architectures") or []]
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
