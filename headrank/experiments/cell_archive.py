"""Many cells in two small files: cells.jsonl.gz (a line per cell: its place and metrics) and scores.jsonl.gz beside it.

An archive is what a repository or a reader keeps of a study. ``find_cells`` reads it like the folder of cells it was
made from; docs/results_tables.py writes the one of this repository.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.scored_lists import QueryScores, parse_scores
from headrank.experiments.cells import Cell, require_cell
from headrank.files import atomic_write, parse_object, read_lines

CELLS, SCORE_LISTS = "cells.jsonl.gz", "scores.jsonl.gz"


@dataclass(frozen=True)
class ArchivedCell(Cell):
    """A cell of an archive; ``path`` is the archive's file and the place that the cell had in its study."""

    archive: Path
    place: str

    def scores(self) -> list[QueryScores]:
        """The per-document scores kept for this cell; empty when the archive has none of it."""
        kept = self.archive.with_name(SCORE_LISTS)
        where = f"{kept} ({self.place})"
        return [parse_scores(row, where) for row in (_score_lists(kept).get(self.place, []) if kept.is_file() else [])]


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is an archive's cells.jsonl.gz, or a folder that holds one."""
    return archive_file(path).is_file()


def archive_file(path: str | os.PathLike[str]) -> Path:
    """cells.jsonl.gz, given itself or its folder."""
    return Path(path) if Path(path).name == CELLS else Path(path) / CELLS


def read_archive(path: str | os.PathLike[str]) -> list[Cell]:
    """The cells of an archive in its order; a line that is no cell is an InputError that names it."""
    file = archive_file(path)
    cells: list[Cell] = []
    for number, line in read_lines(file):
        row = parse_object(file, number, line)
        if not isinstance(row.get("place"), str):
            raise InputError(f"{file}:{number}: a cell without its 'place'; write the archive again")
        metrics = require_cell(row.get("metrics"), f"{file}:{number}")
        cells.append(ArchivedCell(file / row["place"], metrics, file, row["place"]))
    if not cells:
        raise InputError(f"{file}: no cell in it; write the archive again")
    return cells


def write_archive(cells: Sequence[Cell], root: str | os.PathLike[str], output: str | os.PathLike[str]) -> list[Path]:
    """Write the cells, whose places are their paths below ``root``; equal cells give equal bytes."""
    placed = sorted((_place(cell, Path(root)), cell) for cell in cells)
    folder = Path(output)
    _write(folder / CELLS, ({"place": place, "metrics": cell.metrics} for place, cell in placed))
    lists = (
        {"place": place, "lists": [row.to_dict() for row in rows]} for place, cell in placed if (rows := cell.scores())
    )
    _write(folder / SCORE_LISTS, lists)
    _score_lists.cache_clear()
    return [folder / CELLS, folder / SCORE_LISTS]


def _place(cell: Cell, root: Path) -> str:
    return cell.place if isinstance(cell, ArchivedCell) else cell.path.relative_to(root).as_posix()


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
    with atomic_write(path, "wb") as stream:
        stream.write(gzip.compress(text.encode("utf-8"), 9, mtime=0))  # a time stamp would make equal archives differ


@lru_cache(maxsize=2)
def _score_lists(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read once: each cell of a report would otherwise unpack the whole file again."""
    rows = (parse_object(path, number, line) for number, line in read_lines(path))
    return {str(row["place"]): row["lists"] for row in rows}
