"""Safetensors on disk: reading slices out of a model directory, and writing one sharded by size with its index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrank.errors import InputError
from headrank.reranking.model_sources import is_adapter_folder

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}
_MAX_MAPPED = 16 << 20  # bytes read from a file before it is closed and opened again
_BASE_PREFIX = "model."  # a directory saved from the bare decoder (AutoModel) leaves it out


class SafetensorsReader:
    """The tensors of a Hugging Face directory, by name, whole or in slices; files are opened as they are needed.

    Pages of an open file count as this process's memory, so only one file is open at a time, and it is closed after
    every 16 MB that were read from it. Opening it again costs one look at its header.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file_of = self._list_tensors()
        self._open_name: str | None = None
        self._open: Any = None
        self._mapped = 0

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._file_of

    def names(self) -> Sequence[str]:
        """Every tensor's name, as stored."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; reads nothing but an empty slice."""
        return self._slice(name)[:0].dtype

    def read(self, name: str, axis: int = 0, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """The tensor, or the part [start, stop) along an axis, in memory of its own."""
        if start is None:
            # copied: a tensor that maps the file would keep its pages in memory after close()
            tensor = self._file(name).get_tensor(self._resolve(name)).clone()
        else:
            part = self._slice(name)
            tensor = (part[start:stop] if axis == 0 else part[:, start:stop]).clone()
            del part  # it would keep the file mapped
        self._mapped += tensor.nbytes
        if self._mapped > _MAX_MAPPED:
            self.close()
        return tensor

    def close(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._open_name = None
        self._mapped = 0

    def _resolve(self, name: str) -> str:
        if (
            name not in self._file_of
            and name.startswith(_BASE_PREFIX)
            and name.removeprefix(_BASE_PREFIX) in self._file_of
        ):
            return name.removeprefix(_BASE_PREFIX)
        return name

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._resolve(name))

    def _file(self, name: str) -> Any:
        file_name = self._file_of[self._resolve(name)]
        if file_name != self._open_name:
            self.close()
            try:
                self._open = safe_open(self.directory / file_name, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise InputError(f"{self.directory / file_name}: cannot be read as safetensors ({error})") from error
            self._open_name = file_name
        return self._open

    def _list_tensors(self) -> dict[str, str]:
        index, single = self.directory / INDEX_NAME, self.directory / SINGLE_NAME
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InputError(f"{index}: not a safetensors index ({error!r}); download the model again") from error
        if not single.is_file() and is_adapter_folder(self.directory):
            raise InputError(
                f"{self.directory}: an adapter without weights; give its base model, and the adapter to 'headrank "
                "import-hf --adapter'"
            )
        if not single.is_file():
            raise InputError(
                f"{self.directory}: no {SINGLE_NAME} or {INDEX_NAME}; give a Hugging Face directory with "
                "safetensors weights"
            )
        try:
            with safe_open(single, framework="pt") as stream:
                return dict.fromkeys(stream.keys(), SINGLE_NAME)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{single}: cannot be read as safetensors ({error})") from error


def local_directory(name: str | Path) -> Path:
    """The directory of a model: a local one, or the hub's snapshot in the user's cache."""
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(name),
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md"],
            )
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}: neither a directory nor a model that can be downloaded ({str(error).splitlines()[0]})"
        ) from error


def plan_shards(sizes: Mapping[str, int], max_shard_size: int) -> list[list[str]]:
    """Fill shards in order up to ``max_shard_size`` bytes; a tensor larger than that has a shard to itself."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    return shards


def shard_file_names(num_shards: int) -> list[str]:
    """The names transformers gives its files."""
    if num_shards == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def write_shard(
    path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """One safetensors file written tensor by tensor, so that only one of them need be in memory.

    ``layout`` says what will come; ``tensors`` may come in any order, each exactly once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for the mark
    position = 0
    # wide types first keeps every tensor aligned
    for name in sorted(layout, key=lambda name: (-layout[name][0].itemsize, name)):
        dtype, shape = layout[name]
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # the format wants the data aligned to 8 bytes; spaces are white space in JSON
    text += b" " * (-len(text) % 8)
    missing = set(layout)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        # the whole size at once: a disk that is too small says so before hours of conversion
        stream.truncate(8 + len(text) + position)
        for name, tensor in tensors:
            assert (tensor.dtype, tuple(tensor.shape)) == layout[name], (
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not {layout[name]}"
            )
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            # as bytes: numpy has no bfloat16
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            missing.remove(name)
    assert not missing, f"{path}: never given: {sorted(missing)}"


def write_index(directory: Path, shards: Sequence[Iterable[str]], sizes: Mapping[str, int]) -> None:
    """The index of several shards; a single file needs none."""
    if len(shards) == 1:
        return
    weight_map = {
        name: file_name
        for file_name, names in zip(shard_file_names(len(shards)), shards, strict=True)
        for name in names
    }
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 123456 (decimal units, as transformers)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    units = {None: 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    value = int(float(match.group(1)) * units[match.group(2)]) if match else 0
    if value < 1:
        raise InputError(f"`max_shard_size` {text!r} is not a size; write for instance 5GB or 500MB")
    return value
