"""Finished queries of an unfinished run, kept on disk so that an interrupted job goes on where it stopped."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any


class PartialResults:
    """Finished queries on disk, one JSON line each, in one file per process; read by all, appended by one."""

    def __init__(self, output: Path, key: str, rank: int, *, restart: bool = False, only_ids: bool = False) -> None:
        """Collect what earlier processes finished under the same key; other keys are set aside.

        ``only_ids`` keeps the lines on the disk, for runs that are larger than memory: ``done`` has the ids, ``rows``
        reads them.
        """
        self.output, self.key, self._only_ids = output, key, only_ids
        self.done: dict[str, dict[str, Any]] = {}
        self._path = output.parent / f"{output.name}.partial-{key}.{rank}.jsonl"
        for path in self._files():
            if restart:
                path.unlink(missing_ok=True)
            else:
                self._read(path)
        self._stream: IO[str] | None = None

    def _files(self) -> list[Path]:
        return sorted(self.output.parent.glob(f"{glob.escape(self.output.name)}.partial-{self.key}.*.jsonl"))

    def _read(self, path: Path) -> None:
        for row in _whole_lines(path):
            self.done[row["query_id"]] = {} if self._only_ids else row

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every finished query once, in the order in which they were finished."""
        left = set(self.done)
        for path in self._files():
            for row in _whole_lines(path):
                if row["query_id"] in left:
                    left.remove(row["query_id"])
                    yield row

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append finished queries and flush, so that a kill loses at most the query in work; a failure leaves no
        empty file.
        """
        finished = list(rows)
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - stays open from query to query
            if torn:
                self._stream.write("\n")
        for row in finished:
            self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close this process's file."""
        if self._stream is not None:
            self._stream.close()

    def discard(self) -> None:
        """Remove the partial files once the output is in place."""
        for path in self._files():
            path.unlink(missing_ok=True)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            with contextlib.suppress(json.JSONDecodeError):  # the line that was being written when the process died
                yield json.loads(line)
