"""Bytes of a checkpoint that changed on disk. Every piece is a zip that torch wrote with checksums; torch itself
does not compare them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import megatron.core
import torch
from torch.distributed.checkpoint import FileSystemReader

from headrank.errors import InputError
from megatron_patches.parallel_scores import gather_from_all
from megatron_patches.versions import common_file, keeps_common_data_inside, reads_common_data_inside

_CHUNK = 1 << 20
_IS_FOLDER = 0x10  # torch would read nothing
# what zipfile raises for a changed byte, wherever it lies: checksum, header, length, flags
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError, struct.error)


class DamagedCheckpoint(InputError):
    """A file of a checkpoint is not what was written; an older checkpoint may be whole."""


def require_undamaged(directory: Path) -> None:
    """Read every piece of a complete checkpoint once and compare its checksums. Collective: ranks share the reading
    and all raise alike.
    """
    metadata = FileSystemReader(str(directory)).read_metadata()
    if keeps_common_data_inside(metadata) and not reads_common_data_inside():
        raise InputError(
            f"{directory}: was saved with Megatron-Core 0.19 or newer, which {megatron.core.__version__} cannot read; "
            "install the one it was saved with, or export it there with 'headrank export-hf'"
        )
    pieces = sorted((info.relative_path, info.offset, info.length) for info in (metadata.storage_data or {}).values())
    common = common_file(directory, metadata)
    if common is not None:
        pieces.append((common.name, 0, common.stat().st_size))
    # every rank reads its share: one that read a whole checkpoint of many gigabytes would keep the others waiting
    mine = pieces[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    damaged = next((name for name, offset, length in mine if not _is_sound(directory / name, offset, length)), None)
    # raised on every rank or on none: the fallback to an older checkpoint is collective
    found = next((name for name in gather_from_all(damaged) if name is not None), None)
    if found is not None:
        raise DamagedCheckpoint(f"{directory / found}: damaged, its checksums do not match")


def _is_sound(path: Path, offset: int, length: int) -> bool:
    """Whether the zip in this part of a file is whole; zipfile compares the checksum of an entry that is read to its
    end.
    """
    try:
        # unbuffered below a buffer of its own, so that positions are those of the part and not of the file
        with open(path, "rb", buffering=0) as stream:
            part = io.BufferedReader(_Part(stream, offset, length))
            with zipfile.ZipFile(part) as archive:
                for entry in archive.infolist():
                    if entry.external_attr & _IS_FOLDER:
                        return False
                    with archive.open(entry) as content:
                        while content.read(_CHUNK):
                            pass
            part.seek(0)
            torch._C.PyTorchFileReader(part)  # torch is stricter than zipfile about the zip's own directory
    except _ZIP_ERRORS:
        return False
    return True


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own, for reading."""

    def __init__(self, stream: io.FileIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._place = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if start + place < 0:
            raise OSError("before the beginning")
        self._place = start + place
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._place))
        self._stream.seek(self._offset + self._place)
        count = self._stream.readinto(memoryview(buffer)[:wanted]) or 0
        self._place += count
        return count
