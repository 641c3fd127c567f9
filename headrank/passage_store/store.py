"""A store as its readers see it: a folder of segments, found by content, read in place. No torch in here.

Any number of readers may have a store open while one writer appends: they see what was committed when they opened or
last refreshed, and files that pruning removed stay readable to those who have them mapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.files import atomic_write
from headrank.passage_store.header import HEADER_FILE, StoreHeader
from headrank.passage_store.records import RECORD, SHORTENED, halves
from headrank.passage_store.segment import RECORDS, Segment

SEGMENTS, SCALES_FILE = "segments", "scales.bin"
BYTES_PER_RECORD = RECORD.itemsize + 12  # and its place in the sorted index


@dataclass(frozen=True)
class Scales:
    """Per pair and channel, float32 [A, D]: int8 keys are centre + integer * scale, and logits are measured from the
    centre.
    """

    scale_AD: np.ndarray
    centre_AD: np.ndarray

    def to_bytes(self) -> bytes:
        """Scale, then centre."""
        return np.stack([self.scale_AD, self.centre_AD]).astype("<f4").tobytes()

    @property
    def digest(self) -> str:
        """What store.json remembers of them."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Entry:
    """Where one passage lies."""

    segment: Segment
    number: int

    @property
    def keys_ATD(self) -> np.ndarray:
        """Its stored keys, in place; T counts stored tokens."""
        return self.segment.keys(self.number)

    @property
    def num_keys(self) -> int:
        """Stored tokens."""
        return int(self.segment.records["num_keys"][self.number])

    @property
    def num_tokens(self) -> int:
        """Tokens of its text."""
        return int(self.segment.records["num_tokens"][self.number])

    @property
    def is_shortened(self) -> bool:
        """Whether its end did not fit before the branch position."""
        return bool(self.segment.records["flags"][self.number] & SHORTENED)


class PassageStore:
    """A store opened for reading."""

    def __init__(self, folder: str | Path) -> None:
        """Map every segment; sizes and checksums that can be checked without reading the keys are checked."""
        self.folder = Path(folder)
        self.header = StoreHeader.read(self.folder)
        self.scales = _read_scales(self.folder, self.header)
        self.segments: list[Segment] = []
        self.refresh()

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def refresh(self) -> None:
        """See what was committed since: new segments, and more records in the ones that grew."""
        known = {segment.folder: segment for segment in self.segments}
        self.segments = []
        for folder in segment_folders(self.folder):
            # a segment that did not grow keeps its map: opening it again would touch all its records
            before = known.get(folder)
            size = (folder / RECORDS).stat().st_size // RECORD.itemsize if (folder / RECORDS).is_file() else 0
            is_same = before is not None and len(before) == size
            self.segments.append(before if is_same and before is not None else Segment.open(folder, self.header))

    def find(self, digests: Sequence[bytes]) -> list[Entry | None]:
        """The entry of each passage, None for one that is not here."""
        found: list[Entry | None] = [None] * len(digests)
        if not digests:
            return found
        firsts, seconds = halves(digests)
        for segment in self.segments:
            numbers = segment.find(firsts, seconds)
            for row in np.flatnonzero(numbers >= 0):
                # the first segment wins: a passage may stand in two after a kill in the middle of pruning
                found[row] = found[row] or Entry(segment, int(numbers[row]))
        return found

    def summary(self) -> dict[str, Any]:
        """Counts over all segments, for --info."""
        records = [segment.records for segment in self.segments]
        stored = sum(int(part["num_keys"].sum(dtype=np.int64)) for part in records)
        numbers = stored * len(self.header.pairs) * self.header.identity.head_size
        return {
            "passages": len(self),
            "tokens": sum(int(part["num_tokens"].sum(dtype=np.int64)) for part in records),
            "stored_tokens": stored,
            "key_bytes": stored * self.header.bytes_per_key,
            "index_bytes": len(self) * BYTES_PER_RECORD,
            "saturated": sum(int(part["saturated"].sum(dtype=np.int64)) for part in records),
            "numbers": numbers,
            "shortened": sum(int((part["flags"] & SHORTENED).sum()) for part in records),
            "segments": len(self.segments),
            "unsealed": sum(not segment.is_sealed for segment in self.segments),
        }


def segment_folders(folder: Path) -> list[Path]:
    """The segments of a store in the order they were begun."""
    parent = folder / SEGMENTS
    return sorted(path for path in parent.iterdir() if path.name.isdigit()) if parent.is_dir() else []


def create_store(folder: Path, header: StoreHeader, scales: Scales) -> None:
    """Make an empty store; store.json comes last, so that a store is whole or not there."""
    if (folder / HEADER_FILE).exists():
        raise InputError(f"{folder}: there is a store already; choose another folder")
    if folder.is_dir() and any(
        path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in (SEGMENTS, SCALES_FILE)
    ):
        raise InputError(f"{folder}: holds other files; give a store a folder of its own")
    (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / SCALES_FILE, "wb") as stream:
        stream.write(scales.to_bytes())
    # last: store.json is what makes the folder a store, and it names the digest of the scales
    header.write(folder)


def _read_scales(folder: Path, header: StoreHeader) -> Scales:
    path = folder / SCALES_FILE
    shape = (2, len(header.pairs), header.identity.head_size)
    raw = path.read_bytes() if path.is_file() else b""
    if len(raw) != 4 * int(np.prod(shape)):
        raise InputError(
            f"{path}: missing or cut short, and without its scales a store means nothing; restore the file or index "
            "again"
        )
    scale_AD, centre_AD = np.frombuffer(raw, "<f4").reshape(shape).copy()
    scales = Scales(scale_AD, centre_AD)
    if scales.digest != header.scales:
        raise InputError(f"{path}: is not the file that the store was made with; restore it or index again")
    return scales
