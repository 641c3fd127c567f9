"""One segment of a store: a file of keys, a file of records, and a sorted index once it is sealed. No torch in here.

Shapes: n records of the segment, A key pairs, T stored tokens of a passage, D head size.

keys.bin     keys of passages, one after another, each pairs x tokens x head size
records.bin  a record per passage, see records.py
index.bin    n first halves of digests, ascending, then n record numbers: mapped, so that opening reads nothing
seal.json    the sizes of all three, written last; a segment without it was not closed, and its reader sorts for itself
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.files import atomic_write, read_json, write_json
from headrank.passage_store.header import StoreHeader
from headrank.passage_store.records import RECORD, record_checks, valid_prefix

KEYS, RECORDS, INDEX, SEAL = "keys.bin", "records.bin", "index.bin", "seal.json"
# bf16 as its bits
NUMPY_TYPE: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "bf16": np.dtype("<u2"), "fp32": np.dtype("<f4")}


@dataclass
class Segment:
    """A segment as one reader sees it: the records that were there when it was opened."""

    folder: Path
    header: StoreHeader
    records: np.ndarray
    bytes_of_keys: np.ndarray
    firsts: np.ndarray  # ascending
    order: np.ndarray  # record number of each of them
    is_sealed: bool

    @classmethod
    def open(cls, folder: Path, header: StoreHeader) -> Segment:
        """Map a segment and check what can be checked without reading its keys; damage is an InputError that names
        the file.
        """
        records = _mapped(folder / RECORDS).view(np.uint8)
        keys = _mapped(folder / KEYS)
        # a record that a kill cut off is not there
        whole = records[: len(records) // RECORD.itemsize * RECORD.itemsize].view(RECORD)
        seal = _read_seal(folder)
        if seal is not None:
            return cls._open_sealed(folder, header, whole, keys, seal)
        count, has_more = valid_prefix(whole, len(keys), header.bytes_per_key)
        if has_more:
            raise InputError(
                f"{folder / RECORDS}: record {count + 1} is damaged; 'headrank index --prune' keeps what is whole"
            )
        order = np.argsort(whole["first"][:count], kind="stable").astype("<u4")
        return cls(folder, header, whole[:count], keys, whole["first"][order], order, is_sealed=False)

    @classmethod
    def _open_sealed(
        cls, folder: Path, header: StoreHeader, records: np.ndarray, keys: np.ndarray, seal: Mapping[str, int]
    ) -> Segment:
        index = _mapped(folder / INDEX)
        count = seal["records"]
        found = {"records": len(records), "keys_bytes": len(keys), "index_bytes": len(index)}
        for name, size in found.items():
            # more is no damage: a writer may have begun to continue the segment
            if size < seal[name]:
                raise InputError(
                    f"{folder}: sealed with {seal[name]:,} {name.replace('_', ' ')}, found {size:,}; "
                    "restore the files, or let 'headrank index --prune' keep what is whole"
                )
        firsts, order = index[: 8 * count].view("<u8"), index[8 * count : 12 * count].view("<u4")
        return cls(folder, header, records[:count], keys, firsts, order, is_sealed=True)

    def __len__(self) -> int:
        return len(self.records)

    def find(self, firsts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """The record number of each digest, -1 where it is not here; a found record whose checksum is wrong is an
        InputError.
        """
        numbers = np.full(len(firsts), -1, np.int64)
        if not len(self.records):
            return numbers
        places = np.searchsorted(self.firsts, firsts)
        for row in np.flatnonzero(self.firsts[np.minimum(places, len(self.firsts) - 1)] == firsts):
            place = int(places[row])
            # other passages may share the first half
            while place < len(self.firsts) and self.firsts[place] == firsts[row]:
                if self.records["second"][self.order[place]] == seconds[row]:
                    numbers[row] = self.order[place]
                    break
                place += 1
        # only what is asked for is checked: a whole store is verified by 'headrank index --verify'
        self.check(numbers[numbers >= 0])
        return numbers

    def check(self, numbers: np.ndarray | Sequence[int]) -> None:
        """Raise InputError unless these records are as they were written and their keys lie within the key file."""
        records = self.records[numbers]
        ends = records["offset"] + records["num_keys"].astype(np.uint64) * np.uint64(self.header.bytes_per_key)
        wrong = (records["check"] != record_checks(records)) | (ends > np.uint64(len(self.bytes_of_keys)))
        if wrong.any():
            number = int(numbers[int(np.argmax(wrong))]) + 1
            raise InputError(
                f"{self.folder / RECORDS}: record {number} is damaged; 'headrank index --prune' keeps what is whole"
            )

    def keys(self, number: int) -> np.ndarray:
        """The keys [A, T, D] of a record, read in place; bf16 as its bits."""
        record = self.records[number]
        start, count = int(record["offset"]), int(record["num_keys"])
        flat = self.bytes_of_keys[start : start + count * self.header.bytes_per_key]
        return flat.view(NUMPY_TYPE[self.header.dtype]).reshape(
            len(self.header.pairs), count, self.header.identity.head_size
        )


def seal(folder: Path, records: np.ndarray, keys_bytes: int) -> None:
    """Write the sorted index, then seal.json; ``records`` are all that count."""
    order = np.argsort(records["first"], kind="stable").astype("<u4")
    with atomic_write(folder / INDEX, "wb") as stream:
        stream.write(records["first"][order].tobytes())
        stream.write(order.tobytes())
        stream.flush()
        # the index before the seal that vouches for it
        os.fsync(stream.fileno())
    write_json(folder / SEAL, {"records": len(records), "keys_bytes": keys_bytes, "index_bytes": 12 * len(records)})


def _read_seal(folder: Path) -> dict[str, int] | None:
    path = folder / SEAL
    if not path.is_file():
        return None
    values = read_json(path)
    names = ("records", "keys_bytes", "index_bytes")
    if not isinstance(values, dict) or not all(type(values.get(name)) is int for name in names):
        raise InputError(f"{path}: not a seal; remove the file, and the segment is read record by record")
    return {name: values[name] for name in names}


def _mapped(path: Path) -> np.ndarray:
    """The bytes of a file, mapped read-only; no copy, and no memory until they are read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); restore the file, or remove its segment's folder"
        ) from error
