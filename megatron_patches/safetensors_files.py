"""Safetensors on disk: reading slices out of a model directory, and writing one sharded by size with its index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrank.errors import InputError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_BASE_PREFIX = "model."  # a directory saved from the bare decoder (AutoModel) leaves it out


class SafetensorsReader:
    """The tensors of a Hugging Face directory, by name, whole or in slices; files are opened as they are needed.

    Only one file is kept open (its pages count as this process's memory), so reading in file order costs nothing.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file_of = self._list_tensors()
        self._open_name: str | None = None
        self._open: Any = None

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
            return self._file(name).get_tensor(self._resolve(name)).clone()
        part = self._slice(name)
        return (part[start:stop] if axis == 0 else part[:, start:stop]).clone()

    def close(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._open_name = None

    def _resolve(self, name: str) -> str:
        if name not in self._file_of and name.startswith(_BASE_PREFIX) and name.removeprefix(_BASE_PREFIX) in self._file_of:
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
        if not single.is_file():
            raise InputError(f"{self.directory}: no {SINGLE_NAME} or {INDEX_NAME}; give a Hugging Face directory with safetensors weights")
        try:
            with safe_open(single, framework="pt") as stream:
                return dict.fromkeys(stream.keys(), SINGLE_NAME)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{single}: cannot be read as safetensors ({error})") from error


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


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file, marked as torch's as transformers expects."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_index(directory: Path, shards: Sequence[Iterable[str]], sizes: Mapping[str, int]) -> None:
    """The index of several shards; a single file needs none."""
    if len(shards) == 1:
        return
    weight_map = {name: file_name for file_name, names in zip(shard_file_names(len(shards)), shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 123456 (decimal units, as transformers)."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    for unit, factor in sorted(units.items(), key=lambda item: -len(item[0])):
        if text.upper().endswith(unit):
            text, scale = text[: -len(unit)], factor
            break
    else:
        scale = 1
    try:
        value = int(float(text) * scale)
    except ValueError:
        value = 0
    if value < 1:
        raise InputError(f"--max-shard-size {text!r} is not a size; write for instance 5GB or 500MB")
    return value


def iterate_files(directory: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """The files of a model directory that match one of the patterns, in order, each once."""
    seen: set[Path] = set()
    for pattern in patterns:
        for path in sorted(directory.glob(pattern)):
            if path.is_file() and path not in seen:
                seen.add(path)
                yield path
