"""Looking after a store: check every byte of it, and rewrite it without what is damaged or not wanted any more. No
torch in here.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrank.errors import InputError
from headrank.passage_store.header import StoreHeader
from headrank.passage_store.records import RECORD, keys_checksum, record_checks
from headrank.passage_store.segment import KEYS, RECORDS, SEAL, Segment
from headrank.passage_store.store import segment_folders
from headrank.passage_store.writer import StoreWriter


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong, in words."""

    place: Path
    what: str


def verify(folder: Path) -> tuple[int, list[Damage]]:
    """Read every record and every key: the number of whole passages, and what is wrong."""
    header = StoreHeader.read(folder)
    count, damage = 0, []
    for segment in segment_folders(folder):
        try:
            opened = Segment.open(segment, header)
        except InputError as error:
            damage.append(Damage(segment, str(error)))
        else:
            if opened.is_sealed and not _index_is_right(opened):
                damage.append(
                    Damage(segment, "the index does not fit the records; 'headrank index --prune' makes it anew")
                )
        records, is_whole = whole_records(segment, header)
        count += int(is_whole.sum())
        torn = not (segment / SEAL).is_file()  # what a killed writer left at the end is no damage
        last = int(np.flatnonzero(is_whole)[-1]) + 1 if is_whole.any() else 0
        for number in np.flatnonzero(~is_whole[:last] if torn else ~is_whole):
            damage.append(
                Damage(segment, f"passage {int(number) + 1} of {len(records):,}: its record or keys are damaged")
            )
    return count, damage


def whole_records(segment: Path, header: StoreHeader) -> tuple[np.ndarray, np.ndarray]:
    """All records of a segment, and for each whether it and its keys are as they were written."""
    size = (segment / RECORDS).stat().st_size // RECORD.itemsize if (segment / RECORDS).is_file() else 0
    records = np.fromfile(segment / RECORDS, RECORD, count=size) if size else np.empty(0, RECORD)
    is_whole = records["check"] == record_checks(records)
    key_file = segment / KEYS
    with open(key_file, "rb") as stream:
        for number in np.flatnonzero(is_whole):
            length = int(records["num_keys"][number]) * header.bytes_per_key
            stream.seek(int(records["offset"][number]))
            raw = stream.read(length)
            is_whole[number] = len(raw) == length and keys_checksum(np.frombuffer(raw, np.uint8)) == int(
                records["keys_crc"][number]
            )
    return records, is_whole


def _index_is_right(segment: Segment) -> bool:
    numbers = np.asarray(segment.order)
    if len(numbers) and int(numbers.max()) >= len(segment.records):
        return False
    return bool((np.bincount(numbers, minlength=len(numbers)) == 1).all()) and np.array_equal(
        segment.records["first"][numbers], segment.firsts
    )


def prune(folder: Path, wanted: Collection[bytes] | None = None) -> tuple[int, int]:
    """Rewrite the store without damaged passages, repeated ones and, if ``wanted`` is given, all that are not in it:
    (kept, dropped).

    The caller holds the lock. New segments are whole before old ones go: a kill in between leaves passages twice, none
    lost.
    """
    header = StoreHeader.read(folder)
    old = segment_folders(folder)
    seen: set[bytes] = set()
    kept = dropped = 0
    kept_as_they_are = []
    with _PruningWriter(folder, header) as writer:
        for segment in old:
            records, is_whole = whole_records(segment, header)
            digests = [record["first"].tobytes() + record["second"].tobytes() for record in records]
            chosen = []
            for number, digest in enumerate(digests):
                if is_whole[number] and digest not in seen and (wanted is None or digest in wanted):
                    seen.add(digest)
                    chosen.append(number)
            kept, dropped = kept + len(chosen), dropped + len(records) - len(chosen)
            if (
                len(chosen) == len(records)
                and len(records)
                and (segment / SEAL).is_file()
                and _index_is_right(Segment.open(segment, header))
            ):
                kept_as_they_are.append(segment)
                continue
            _copy(segment, records, chosen, digests, header, writer)
            writer.commit()
    for segment in old:
        if segment not in kept_as_they_are:
            shutil.rmtree(segment)
    return kept, dropped


class _PruningWriter(StoreWriter):
    """Never continues an old segment: they are what is being read."""

    def _take(self, segment: Path) -> bool:
        return False


def _copy(
    segment: Path,
    records: np.ndarray,
    chosen: list[int],
    digests: list[bytes],
    header: StoreHeader,
    writer: StoreWriter,
) -> None:
    with open(segment / KEYS, "rb") as stream:
        for number in chosen:
            record = records[number]
            stream.seek(int(record["offset"]))
            raw = np.frombuffer(stream.read(int(record["num_keys"]) * header.bytes_per_key), np.uint8)
            writer.add_raw(digests[number], raw, record)
