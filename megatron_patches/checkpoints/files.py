"""Checkpoints in Megatron's layout: iter_NNNNNNN/ or release/ in torch_dist format, latest_checkpointed_iteration.txt
beside them.

A directory appears under its final name only when everything in it is written; the tracker file follows, atomically,
last. Layers have keys of their own (Megatron's ``non_homogeneous_layers``), because the last layer of a truncated model
is not like the others; the choice travels in the checkpoint's content metadata, which stock Megatron reads. Any TP in,
any TP out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from headrank.errors import InputError
from headrank.files import atomic_write
from headrank.lora_settings import LoraSettings
from megatron_patches.checkpoints.damage import require_undamaged
from megatron_patches.checkpoints.optimizer_state import ensure_adam_state, load_optimizer_state
from megatron_patches.checkpoints.query_key import take_query_key_from_full
from megatron_patches.checkpoints.writers import prepare_writers
from megatron_patches.lora import adapter_parameter
from megatron_patches.model import HeadRankModel
from megatron_patches.readout_weights import PARAMETER
from megatron_patches.shape import ModelShape
from megatron_patches.versions import common_file

logger = logging.getLogger(__name__)

Iteration = int | Literal["release"]
TRACKER = "latest_checkpointed_iteration.txt"
WRITE_ERRORS = (CheckpointException, OSError, RuntimeError)  # what a full disk raises inside a save
CONTENT_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",  # Megatron's default raises with the distributed optimizer
    "chained_optim_avoid_prefix": True,
    # else every data-parallel rank holds the whole optimizer state of its tensor-parallel shard while it is saved
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def iteration_directory(root: str | Path, iteration: Iteration) -> Path:
    """Where a checkpoint of this iteration lives."""
    return Path(root) / ("release" if iteration == "release" else f"iter_{iteration:07d}")


def save_checkpoint(
    root: str | Path,
    iteration: Iteration,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save on all ranks together. ``extra`` is plain data, the same on every rank; it comes back from
    ``load_checkpoint``.
    """
    bare = unwrap_model(model)
    state: dict[str, Any] = {"model": _without_extra_state(bare.sharded_state_dict(metadata=dict(CONTENT_METADATA)))}
    if optimizer is not None:
        ensure_adam_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(CONTENT_METADATA))
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    last_layer = bare.config.num_layers - 1 if bare.is_truncated else None
    return write_checkpoint(root, iteration, state, description(bare.shape, last_layer, extra, lora=bare.lora))


def description(
    shape: ModelShape,
    last_layer: int | None,
    extra: Mapping[str, Any] | None = None,
    *,
    lora: LoraSettings | None = None,
) -> dict[str, Any]:
    """What makes a checkpoint describe itself: the model's sizes, where it is cut, its adapters, and the caller's
    own data.
    """
    adapters = None if lora is None else lora.to_dict()
    return {"shape": dataclasses.asdict(shape), "last_layer": last_layer, "lora": adapters, "extra": dict(extra or {})}


def write_checkpoint(root: str | Path, iteration: Iteration, state: ShardedStateDict, about: Mapping[str, Any]) -> Path:
    """Write a sharded state dict under a temporary name, rename it, then move the tracker. Collective."""
    final = iteration_directory(root, iteration)
    temporary = final.with_name(f".saving-{final.name}")
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    prepare_writers()
    torch.distributed.barrier()
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0 if iteration == "release" else iteration,
        "headrank": dict(about),
    }
    try:
        dist_checkpointing.save(
            {**common, **state},
            str(temporary),
            sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            content_metadata=dict(CONTENT_METADATA),
        )
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its room is needed
        raise
    torch.distributed.barrier()
    if is_first:
        doomed = final.with_name(f".removed-{final.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        if final.exists():
            final.rename(doomed)
        temporary.rename(final)
        shutil.rmtree(doomed, ignore_errors=True)
        with atomic_write(Path(root) / TRACKER) as stream:
            stream.write(str(iteration))
    torch.distributed.barrier()
    return final


def write_failure(error: BaseException) -> str:
    """One line about a save that failed: the system's reason, or the last of what the writers said."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"disk full? {str(error).strip().splitlines()[-1]}"


def load_checkpoint(
    root: str | Path,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    iteration: Iteration | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    *,
    can_lack_adapters: bool = False,
) -> dict[str, Any]:
    """Load on all ranks together, at any TP; returns the ``extra`` saved with it. ``iteration`` None takes the latest
    complete one.

    ``check`` sees ``extra`` before anything is loaded. A file that was changed on disk is a DamagedCheckpoint.
    ``can_lack_adapters`` leaves adapters of the model that the checkpoint does not have as they are.

    A truncated model also loads from a full-depth checkpoint (then without optimizer): upper layers and the last
    layer's V are left on disk. With a distributed or mixed-precision optimizer that is not loaded here, call its
    reload_model_params.
    """
    directory = checkpoint_directory(root, iteration)
    require_undamaged(directory)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    extra = dict(common.get("headrank", {}).get("extra", {}))
    if check is not None:
        check(extra)
    bare = unwrap_model(model)
    _check_fits(directory, common.get("headrank"), bare)
    _check_adapters(directory, common.get("headrank", {}).get("lora"), bare.lora, can_lack_adapters)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    wanted: dict[str, Any] = {"model": _without_extra_state(bare.sharded_state_dict(metadata=dict(metadata)))}
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    # a start whose readout was not trained
    if PARAMETER in wanted["model"] and wanted["model"][PARAMETER].key not in stored:
        del wanted["model"][PARAMETER]
    take_query_key_from_full(wanted["model"], bare, stored)
    if can_lack_adapters:
        wanted["model"] = {
            name: entry for name, entry in wanted["model"].items() if entry.key in stored or not adapter_parameter(name)
        }
    _check_keys(directory, wanted["model"], stored)
    if optimizer is not None:
        if "optimizer" not in common:
            raise InputError(
                f"{directory}: was saved without its optimizer; add --no-load-optim to go on with a fresh one"
            )
        ensure_adam_state(optimizer)
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=dict(metadata))
    # a truncated model reads parts of a full-depth checkpoint, which the integrity check would call incomplete
    loaded = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
    result = bare.load_state_dict(loaded["model"], strict=False)
    lacking = [
        key for key in result.missing_keys if not (can_lack_adapters and adapter_parameter(key)) and key != PARAMETER
    ]
    assert not [key for key in [*lacking, *result.unexpected_keys] if not key.endswith("_extra_state")], result
    if optimizer is not None:
        load_optimizer_state(optimizer, loaded["optimizer"])
    if scheduler is not None and "opt_param_scheduler" in common:
        scheduler.load_state_dict(common["opt_param_scheduler"])
    return extra


def checkpoint_directory(root: str | Path, iteration: Iteration | None = None) -> Path:
    """The directory of an iteration, ``root`` itself when it is one, or the latest complete one; an InputError when
    there is none.
    """
    if iteration is None and is_complete(Path(root)):
        return Path(root)
    if iteration is None:
        iteration = latest_complete_iteration(root)
        if iteration is None:
            raise InputError(f"{root}: no checkpoint here; expected {TRACKER} and iter_NNNNNNN or release directories")
    directory = iteration_directory(root, iteration)
    if not is_complete(directory):
        raise InputError(
            f"{directory}: no complete checkpoint here; complete ones: {complete_iterations(root) or 'none'}"
        )
    return directory


def latest_complete_iteration(root: str | Path) -> Iteration | None:
    """The iteration the tracker names, or, when that one is torn or the tracker is missing, the newest complete one
    below it.
    """
    root = Path(root)
    tracker = root / TRACKER
    text = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    if text and text != "release" and not text.isdigit():
        raise InputError(f"{tracker}: {text!r} is neither an iteration nor 'release'")
    named: Iteration | None = "release" if text == "release" else int(text) if text else None
    if named is not None and is_complete(iteration_directory(root, named)):
        return named
    limit = named if isinstance(named, int) else None
    older = [iteration for iteration in complete_iterations(root) if limit is None or iteration <= limit]
    found: Iteration | None = (
        older[-1] if older else "release" if is_complete(iteration_directory(root, "release")) else None
    )
    if named is not None:
        logger.warning(
            "%s is missing or torn; falling back to %s", iteration_directory(root, named), found or "nothing"
        )
    elif found is not None:
        logger.warning("%s has no %s; taking %s", root, TRACKER, found)
    return found


def complete_iterations(root: str | Path) -> list[int]:
    """All complete iterations, ascending."""
    found = []
    for directory in Path(root).glob("iter_*"):
        match = re.fullmatch(r"iter_(\d{7,})", directory.name)
        if match and is_complete(directory):
            found.append(int(match.group(1)))
    return sorted(found)


def is_complete(directory: Path) -> bool:
    """Whether every file that the checkpoint's own metadata names is there and long enough, and the metadata itself
    is whole.
    """
    if not all((directory / name).is_file() for name in (".metadata", "metadata.json")):
        return False
    ends: dict[str, int] = {}
    try:
        json.loads((directory / "metadata.json").read_bytes())
        metadata = FileSystemReader(str(directory)).read_metadata()
        common = common_file(directory, metadata)
        for info in (metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        is_whole = all(
            (directory / name).is_file() and (directory / name).stat().st_size >= end for name, end in ends.items()
        )
    except Exception:  # noqa: BLE001 - a torn or changed pickle raises anything, MemoryError included
        return False
    return is_whole and (common is None or zipfile.is_zipfile(common))  # a zip's directory is at its end


def _without_extra_state(state: ShardedStateDict) -> ShardedStateDict:
    """Leave out Transformer Engine's FP8 bookkeeping: we train in bf16, and a checkpoint written without TE has
    none.
    """
    return {
        key: value
        for key, value in state.items()
        if not (key.endswith("_extra_state") or isinstance(value, ShardedObject))
    }


def _check_fits(directory: Path, about: Mapping[str, Any] | None, model: HeadRankModel) -> None:
    """Compare the sizes and the cut with the model's; a checkpoint of stock Megatron says nothing and is checked by
    shapes only.
    """
    if about is None:
        return
    saved = {field.name: field.default for field in dataclasses.fields(ModelShape)} | about[
        "shape"
    ]  # older ones do not say that they have none
    for name, wanted in dataclasses.asdict(model.shape).items():
        if name != "max_positions" and saved[name] != wanted:
            raise InputError(
                f"{directory}: was saved from another model: {name} is {saved[name]!r} there, {wanted!r} here"
            )
    last_layer = model.config.num_layers - 1 if model.is_truncated else None
    if about["last_layer"] is not None and about["last_layer"] != last_layer:
        needed = "--headrank-full-depth needs all" if last_layer is None else f"these heads need 0-{last_layer}"
        raise InputError(
            f"{directory}: holds layers 0-{about['last_layer']} only, {needed}; "
            "'headrank export-hf' completes it from its base model, start from that"
        )


def _check_adapters(
    directory: Path, saved: Mapping[str, Any] | None, wanted: LoraSettings | None, can_lack: bool
) -> None:
    """Adapters change what the model computes: those of the checkpoint must be those of the run, rank, alpha and
    projections.
    """
    found = LoraSettings.from_dict(saved)
    if found == wanted or (found is None and can_lack):
        return
    if found is None:
        raise InputError(
            f"{directory}: was trained without adapters; remove the flags --headrank-lora-*, or use another --save"
        )
    raise InputError(
        f"{directory}: holds adapters, train them with {found.flags}; 'headrank export-hf' merges them into a model "
        "without any"
    )


def _check_keys(directory: Path, wanted: ShardedStateDict, stored: Mapping[str, ShardedTensor]) -> None:
    for entry in wanted.values():
        if entry.key not in stored:
            hint = (
                " (it stores layers stacked; export it with 'headrank export-hf' first)" if _is_stacked(stored) else ""
            )
            raise InputError(f"{directory}: tensor {entry.key!r} is missing{hint}")


def _is_stacked(stored: Mapping[str, ShardedTensor]) -> bool:
    """Whether layers share one key with the layer as first axis, as stock Megatron writes them by default."""
    return "decoder.layers.self_attention.linear_qkv.weight" in stored
