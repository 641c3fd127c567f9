"""A Megatron checkpoint as a finished Hugging Face directory: weights, configuration, tokenizer, headrank.json, model card.

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

from headrank.errors import InputError
from headrank.files import write_json
from headrank.heads import HeadSet
from headrank.model_card import model_card
from headrank.provenance import versions
from megatron_patches.checkpoint import checkpoint_directory
from megatron_patches.conversion import CheckpointTensors, HfTensors, write_weights
from megatron_patches.safetensors_files import SafetensorsReader
from megatron_patches.shape import ModelShape

logger = logging.getLogger(__name__)

FORMAT = "headrank/1"
_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True)
class ExportRequest:
    """What to export. ``heads`` None takes the set stored with the checkpoint; a full export can also do without any."""

    checkpoint: Path
    base: Path
    output: Path
    base_name: str
    name: str
    heads: HeadSet | None = None
    is_truncated: bool = False
    max_shard_size: int = 5 * 10**9
    dtype: torch.dtype | None = None
    can_overwrite: bool = False


def export_hf(request: ExportRequest, *, report: Any = iter) -> HeadSet | None:
    """Write the directory on all ranks together and return the heads that went into it."""
    directory = checkpoint_directory(request.checkpoint)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    about = common.get("headrank", {})
    shape = ModelShape.from_hf(request.base)
    _check_same_model(directory, about, shape, request.base)
    heads = request.heads or _stored_heads(about)
    if heads is not None:
        heads.check_fits(shape.layers, shape.heads, str(request.base))
    elif request.is_truncated:
        raise InputError(f"--truncate: {directory} has no heads stored with it, so the depth is not known; give --heads heads.json")
    num_layers = heads.l_max + 1 if heads is not None and request.is_truncated else None
    with SafetensorsReader(request.base) as base, _finished_directory(request) as partial:
        tensors = HfTensors(CheckpointTensors(directory), base, shape, num_layers)
        rank, size = dist.get_rank(), dist.get_world_size()
        num_bytes = write_weights(
            partial, tensors, max_shard_size=request.max_shard_size, dtype=request.dtype, rank=rank, size=size, report=report
        )
        dist.barrier()
        if rank == 0:
            _check_written(partial, tensors, request.dtype)
            _copy_companions(request, partial)
            facts = training_facts(common, about)
            if heads is not None:
                _write_headrank_files(request, partial, heads, facts, num_bytes)
            _write_config(request, partial, shape, num_layers)
    return heads


def training_facts(common: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint knows about its making, without this machine's paths."""
    extra = about.get("extra", {})
    facts = {"iteration": common.get("iteration", 0), "last_layer": about.get("last_layer")}
    facts |= {key: value for key, value in extra.items() if key != "heads"}
    return _without_paths({**facts, "versions": versions()})


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items() if not (isinstance(item, str) and os.path.isabs(item))}
    return value


def _stored_heads(about: Mapping[str, Any]) -> HeadSet | None:
    stored = about.get("extra", {}).get("heads")
    return None if stored is None else HeadSet.from_dict({"table": [], **stored})


def _check_same_model(directory: Path, about: Mapping[str, Any], shape: ModelShape, base: Path) -> None:
    """Upper layers come from the base, so it must be the model that was trained."""
    for name, value in about.get("shape", {}).items():
        if name != "max_positions" and asdict(shape).get(name) != value:
            raise InputError(
                f"--base {base}: {name} is {asdict(shape).get(name)!r}, but {directory} was trained from a model with {value!r}"
            )


@contextlib.contextmanager
def _finished_directory(request: ExportRequest) -> Iterator[Path]:
    """A hidden sibling of the output that takes its name on success and vanishes on failure. Collective."""
    output, is_first = request.output.absolute(), dist.get_rank() == 0
    partial, replaced = output.with_name(f".{output.name}.partial"), output.with_name(f".{output.name}.replaced")
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {request.output}: is a file; give the name of a directory")
    if output.exists() and any(output.iterdir()) and not request.can_overwrite:
        raise InputError(f"--output {request.output}: already exists; remove it, choose another or give --overwrite")
    _refuse_to_replace_sources(request, output)
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
            raise InputError(
                f"--output {request.output}: cannot be written ({error.strerror or error}); make room or choose another"
            ) from error
        raise
    if is_first:
        shutil.rmtree(replaced, ignore_errors=True)
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


def _refuse_to_replace_sources(request: ExportRequest, output: Path) -> None:
    """--overwrite removes the whole directory, which must not hold what is being read."""
    for flag, source in (("--checkpoint", request.checkpoint), ("--base", request.base)):
        if output.resolve() in (source.resolve(), *source.resolve().parents):
            raise InputError(f"--output {request.output}: holds {flag} {source}, which would be removed; choose another directory")


def _check_written(partial: Path, tensors: HfTensors, dtype: torch.dtype | None) -> None:
    """Read every header back: a disk that filled up silently must not become a model."""
    with SafetensorsReader(partial) as written:
        for name, (kind, size) in tensors.layout(dtype).items():
            if name not in written or written.shape(name) != size or written.dtype(name) != kind:
                raise InputError(f"{partial}: tensor {name!r} was not written as planned; is the disk full?")


def _copy_companions(request: ExportRequest, partial: Path) -> None:
    patterns = _COPIED if request.is_truncated else (*_COPIED, "generation_config.json")
    for pattern in patterns:
        for path in sorted(request.base.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)


def _write_headrank_files(request: ExportRequest, partial: Path, heads: HeadSet, facts: Mapping[str, Any], num_bytes: int) -> None:
    shown = {**heads.to_dict(), "model": Path(heads.model).name if os.path.isabs(heads.model) else heads.model}
    values = {"format": FORMAT, "heads": shown, "is_truncated": request.is_truncated, "training": dict(facts)}
    write_json(partial / "headrank.json", values)
    card = model_card(
        request.name,
        request.base_name,
        heads,
        is_truncated=request.is_truncated,
        training=facts,
        license_name=_license_of(request.base),
        num_bytes=num_bytes,
    )
    (partial / "README.md").write_text(card, encoding="utf-8")


def _license_of(base: Path) -> str | None:
    """The license line of the base model's own card, if it has one."""
    card = base / "README.md"
    if not card.is_file():
        return None
    for line in card.read_text(encoding="utf-8", errors="replace").splitlines()[:100]:
        if line.startswith("license:"):
            return line.removeprefix("license:").strip() or None
    return None


def _write_config(request: ExportRequest, partial: Path, shape: ModelShape, num_layers: int | None) -> None:
    """The base's configuration; a truncated model is a bare decoder of fewer layers that knows how deep its source was."""
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
