"""The one process that appends to a store (under torchrun: one per rank, each in a segment of its own). No torch in
here.

Keys are written and flushed to the disk first, then their records: a record on the disk never points at keys that are
not. Killed at any moment, a writer leaves whole records and perhaps a torn end, which the next writer cuts off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from headrank.errors import InputError
from headrank.passage_store.header import HEADER_FILE, StoreHeader
from headrank.passage_store.records import RECORD, SHORTENED, halves, keys_checksum, record_checks, valid_prefix
from headrank.passage_store.segment import KEYS, NUMPY_TYPE, RECORDS, SEAL, Segment, seal
from headrank.passage_store.store import SEGMENTS, segment_folders

LOCK_FILE = ".writer.lock"
SEGMENT_BYTES = 4 * 2**30  # of keys; a new segment begins beyond it
REOPENED_BELOW = 64 * 2**20  # a smaller last segment is continued instead of a new one begun


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the store's lock; another writer at work is an InputError, and the lock of a killed one is free."""
    from filelock import FileLock, Timeout

    is_new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{folder}: another process is writing to this store; wait for it, or read only") from None
    try:
        yield
    finally:
        if not (folder / HEADER_FILE).is_file():  # no store came of it: leave the place as it was
            with contextlib.suppress(OSError):
                (folder / LOCK_FILE).unlink()
                if is_new:
                    folder.rmdir()
        lock.release()


class StoreWriter:
    """Appends passages to one segment after another. The caller holds the lock (``writing``) and adds no passage
    twice.
    """

    def __init__(self, folder: Path, header: StoreHeader, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Nothing is opened before the first passage is added."""
        self.folder, self.header, self.segment_bytes = folder, header, segment_bytes
        self._segment: Path | None = None
        self._keys: IO[bytes] | None = None
        self._records: IO[bytes] | None = None
        self._pending: list[np.ndarray] = []
        self._keys_size = 0

    def add(
        self, digest: bytes, keys_ATD: np.ndarray, num_tokens: int, *, is_shortened: bool = False, saturated: int = 0
    ) -> None:
        """Write one passage's keys; they count after the next ``commit``."""
        expected = (len(self.header.pairs), keys_ATD.shape[1], self.header.identity.head_size)
        assert keys_ATD.shape == expected and keys_ATD.dtype == NUMPY_TYPE[self.header.dtype], "made by keys.StoredForm"
        record = np.zeros(1, RECORD)
        record["num_keys"], record["num_tokens"] = keys_ATD.shape[1], num_tokens
        record["saturated"], record["flags"] = saturated, SHORTENED if is_shortened else 0
        self.add_raw(digest, np.ascontiguousarray(keys_ATD), record)

    def add_raw(self, digest: bytes, keys: np.ndarray, record: np.ndarray) -> None:
        """Write keys as they are, with the counts of ``record``; its place and checksums are made here."""
        if self._keys is None:
            self._open_segment()
        assert self._keys is not None
        record = np.array(record, RECORD).reshape(1)
        record["first"], record["second"] = halves([digest])
        record["offset"], record["keys_crc"] = self._keys_size, keys_checksum(keys)
        record["check"] = record_checks(record)
        self._keys.write(keys.data)
        self._keys_size += keys.nbytes
        self._pending.append(record)

    def commit(self) -> None:
        """Make everything added so far durable and visible to readers."""
        if not self._pending or self._keys is None or self._records is None:
            return
        # keys reach the disk before the records that point to them: a record on disk always has its keys
        _flush(self._keys)
        self._records.write(b"".join(record.tobytes() for record in self._pending))
        _flush(self._records)
        self._pending = []
        if self._keys_size >= self.segment_bytes:
            self._seal()

    def close(self) -> None:
        """Commit and seal."""
        self.commit()
        self._seal()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep what is whole, also when leaving by an error."""
        self.close()

    def _open_segment(self) -> None:
        last = next(reversed(segment_folders(self.folder)), None)
        is_small = (
            last is not None
            and (last / KEYS).is_file()
            and (last / KEYS).stat().st_size < min(REOPENED_BELOW, self.segment_bytes)
        )
        if last is not None and is_small and self._take(last):
            self._segment = last
        else:
            self._segment = _new_segment(self.folder)
        self._keys = open(self._segment / KEYS, "ab")  # noqa: SIM115 - stays open from passage to passage
        self._records = open(self._segment / RECORDS, "ab")  # noqa: SIM115
        self._keys_size = (self._segment / KEYS).stat().st_size

    def _take(self, segment: Path) -> bool:
        """Continue a segment that no rank of this very job has begun: its seal goes, and readers sort it themselves
        until it is sealed.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            return False
        recover(segment, self.header)
        # after recover(): a segment without a seal is read record by record
        (segment / SEAL).unlink(missing_ok=True)
        return True

    def _seal(self) -> None:
        if self._keys is None or self._records is None or self._segment is None:
            return
        self._keys.close()
        self._records.close()
        seal(self._segment, np.fromfile(self._segment / RECORDS, RECORD), self._keys_size)
        self._keys = self._records = self._segment = None


def recover(folder: Path, header: StoreHeader) -> int:
    """Cut the torn end off a segment that was not sealed; the number of bytes of keys that were lost with it."""
    if (folder / SEAL).is_file():
        return 0
    for name in (KEYS, RECORDS):
        (folder / name).touch()
    keys_size, records_size = ((folder / name).stat().st_size for name in (KEYS, RECORDS))
    records = np.fromfile(folder / RECORDS, RECORD)
    count, has_more = valid_prefix(records, keys_size, header.bytes_per_key)
    if has_more:
        raise InputError(
            f"{folder / RECORDS}: record {count + 1} is damaged; 'headrank index --prune' keeps what is whole"
        )
    whole = records[:count]
    end = (
        int((whole["offset"] + whole["num_keys"].astype(np.uint64) * np.uint64(header.bytes_per_key)).max())
        if count
        else 0
    )
    if records_size != count * RECORD.itemsize:
        os.truncate(folder / RECORDS, count * RECORD.itemsize)
    if keys_size != end:
        os.truncate(folder / KEYS, end)
    return keys_size - end


def recover_all(folder: Path, header: StoreHeader) -> int:
    """Recover and seal what a killed writer left; called with the lock held. The number of passages in such
    segments.
    """
    count = 0
    for segment in segment_folders(folder):
        if not (segment / SEAL).is_file():
            recover(segment, header)
            records = np.fromfile(segment / RECORDS, RECORD)
            seal(segment, records, (segment / KEYS).stat().st_size)
            count += len(Segment.open(segment, header))
    return count


def _new_segment(folder: Path) -> Path:
    """A folder with the next free number; ranks that ask at the same time get different ones."""
    parent = folder / SEGMENTS
    parent.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in segment_folders(folder)), default=-1)
    while True:
        number += 1
        segment = parent / f"{number:06d}"
        try:
            segment.mkdir()
        except FileExistsError:
            continue
        for name in (KEYS, RECORDS):
            (segment / name).touch()
        return segment


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
