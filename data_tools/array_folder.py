"""A folder of flat arrays, written once and mapped into memory: what token caches are made of.

It is built in a temporary folder under a lock and renamed into place, so processes that start together build it once
and none sees half of it. A million contexts cost address space, not memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrank.errors import InputError
from headrank.formats import read_json

logger = logging.getLogger(__name__)


class UnwritableCache(InputError):
    """A token cache is not there yet and cannot be written where it belongs; another place may do."""


@dataclass(frozen=True)
class Arrays:
    """The arrays of a kind of folder: name -> type, and the number of columns of those that have any."""

    dtypes: Mapping[str, type]
    widths: Mapping[str, int]

    def bytes_of(self, entries: Mapping[str, float]) -> float:
        """Bytes of so many entries of each array."""
        return sum(
            count * self.widths.get(name, 1) * np.dtype(self.dtypes[name]).itemsize for name, count in entries.items()
        )

    def open(self, folder: Path) -> dict[str, np.ndarray]:
        """Map every array; nothing is read until asked for."""
        return {
            name: _open_array(folder / f"{name}.bin", dtype, self.widths.get(name))
            for name, dtype in self.dtypes.items()
        }


class ArrayWriter:
    """Appends to the arrays of a folder that is being built."""

    def __init__(self, arrays: Arrays, files: Mapping[str, BinaryIO]) -> None:
        self._arrays, self._files = arrays, files

    def append(self, name: str, values: object) -> None:
        """Add entries to one array."""
        self._files[name].write(np.ascontiguousarray(values, self._arrays.dtypes[name]).tobytes())


def open_or_build(
    root: Path, key: str, arrays: Arrays, write: Callable[[ArrayWriter], None], meta: Mapping[str, Any], source: Path
) -> Path:
    """The complete folder root/key, built by ``write`` first when it is not there, or an UnwritableCache."""
    folder = root / key
    try:
        if not folder.is_dir():
            _build_once(folder, arrays, write, {"key": key, **meta}, source)
    except OSError as error:
        raise UnwritableCache(
            f"{root}: the token cache cannot be written ({error.strerror or error}); make room or make the folder "
            "writable"
        ) from error
    found = read_json(folder / "meta.json")
    if not isinstance(found, dict) or found.get("key") != key:
        raise InputError(f"{folder}: the token cache does not belong to its name; delete the folder")
    return folder


def in_chunks(items: Iterator, size: int) -> Iterator[list]:
    """Lists of ``size`` items, the last one shorter."""
    chunk: list = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _open_array(path: Path, dtype: type, width: int | None) -> np.ndarray:
    shape: Sequence[int] = (-1,) if width is None else (-1, width)
    # an empty file cannot be mapped
    if path.stat().st_size == 0:
        return np.empty(0, dtype).reshape(shape if width is None else (0, width))
    return np.memmap(path, dtype, mode="r").reshape(shape)


def _build_once(
    folder: Path, arrays: Arrays, write: Callable[[ArrayWriter], None], meta: Mapping[str, Any], source: Path
) -> None:
    """Build the folder under a lock, unless another process does."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder and not in it: it appears by a rename
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            logger.info("tokenising %s into %s", source, folder)
            _build(folder, arrays, write, meta)


def _build(folder: Path, arrays: Arrays, write: Callable[[ArrayWriter], None], meta: Mapping[str, Any]) -> None:
    """Write beside ``folder`` and rename; an interrupted build leaves nothing under the final name."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with contextlib.ExitStack() as files:
            write(
                ArrayWriter(
                    arrays, {name: files.enter_context(open(temporary / f"{name}.bin", "wb")) for name in arrays.dtypes}
                )
            )
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        os.chmod(temporary, 0o755)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another machine was first: its cache is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
