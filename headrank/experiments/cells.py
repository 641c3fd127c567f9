"""One result on disk: a directory with run.txt, scores.jsonl and metrics.json, and the search for such directories.

A *cell* is one model, method, benchmark, depth, document order and seed of the matrix; evaluation/scored_lists.py has
the lines of scores.jsonl.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.scored_lists import QueryScores, read_scores
from headrank.formats import read_json
from headrank.methods import method_order

RUN, SCORES, METRICS = "run.txt", "scores.jsonl", "metrics.json"
_NUMBERS = (
    "depth",
    "seconds_per_query",
    "tokens_per_query",
    "peak_memory_bytes",
    "layers_used",
    "num_layers",
    "success_rate",
)


@dataclass(frozen=True)
class Cell:
    """One directory of the matrix: where it is and its metrics.json."""

    path: Path
    metrics: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model's short name; first-stage rankers have none."""
        return str(self.metrics.get("model") or "")

    @property
    def method(self) -> str:
        """bm25, icr, core, qr, niah, rankgpt, headrank, or a variant as 'headrank+reselected'."""
        return str(self.metrics["method"])

    @property
    def benchmark(self) -> str:
        """The collection's short name."""
        return str(self.metrics["benchmark"])

    @property
    def condition(self) -> tuple[int, str]:
        """What must agree before two cells may stand in one table: depth and document order."""
        return int(self.metrics.get("depth") or 0), str(self.metrics.get("order") or "retriever")

    def value(self, measure: str) -> float | None:
        """The mean of a measure, or None when this cell does not have it."""
        found = self.metrics.get("measures", {}).get(measure)
        return None if found is None else float(found)

    def per_query(self, measure: str) -> dict[str, float]:
        """Query id -> value; empty when the cell kept none."""
        return {str(key): float(value) for key, value in (self.metrics.get("per_query") or {}).get(measure, {}).items()}

    def scores(self) -> list[QueryScores]:
        """The per-document scores; empty when the cell kept none."""
        path = self.path / SCORES
        return read_scores(path) if path.is_file() else []


def read_cell(path: str | os.PathLike[str]) -> Cell:
    """Read one directory; metrics.json must name its method, benchmark and measures."""
    return Cell(Path(path), require_cell(read_json(Path(path) / METRICS), str(Path(path) / METRICS)))


def require_cell(metrics: object, where: str) -> Mapping[str, Any]:
    """The metrics of a cell, or an InputError that begins with ``where`` and says what is wrong with them."""
    if (
        not isinstance(metrics, dict)
        or not isinstance(metrics.get("measures"), dict)
        or not {"method", "benchmark"} <= metrics.keys()
    ):
        raise InputError(f"{where}: not the metrics of a cell; it needs 'method', 'benchmark' and 'measures'")
    if not metrics["measures"]:
        raise InputError(f"{where}: no measure in it; run 'headrank evaluate --write-metrics' again")
    _require_numbers(where, metrics)
    return metrics


def _require_numbers(where: str, metrics: Mapping[str, Any]) -> None:
    """Refuse a value that is no number where tables and figures need one; facts may be absent."""
    facts = {name: metrics[name] for name in _NUMBERS if metrics.get(name) is not None}
    per_query = metrics.get("per_query") or {}
    groups = [metrics["measures"], facts, *(per_query.values() if isinstance(per_query, dict) else [per_query])]
    for values in groups:
        named = values if isinstance(values, dict) else {"per_query": values}
        for name, value in named.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(
                    f"{where}: {name} is {value!r}, not a number; run 'headrank evaluate --write-metrics' again"
                )


def find_cells(folder: str | os.PathLike[str]) -> list[Cell]:
    """All cells below a folder, or of an archive (cell_archive.py), in a fixed order; none is an InputError."""
    from headrank.experiments.cell_archive import is_archive, read_archive  # which needs this module

    root = Path(folder)
    if is_archive(root):
        return sorted(with_short_models(read_archive(root)), key=cell_key)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder of results; make one with 'headrank benchmark run --output {root}'")
    cells = [read_cell(path.parent) for path in sorted(root.rglob(METRICS))]
    if not cells:
        raise InputError(
            f"{root}: no {METRICS} in it or below; run 'headrank benchmark run' or 'headrank evaluate "
            "--write-metrics' first"
        )
    return sorted(with_short_models(cells), key=cell_key)


def with_short_models(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with models named as people name them: of a path or hub name the last parts that still tell the
    models apart.
    """
    full = {cell.model for cell in cells}
    ends = {
        name: ["/".join(name.strip("/").split("/")[-count:]) for count in range(1, name.count("/") + 2)]
        for name in full
    }
    short = {
        name: next((end for end in ends[name] if sum(end in other for other in ends.values()) == 1), name)
        if "/" in name
        else name
        for name in full
    }
    return [
        replace(cell, metrics={**cell.metrics, "model": short[cell.model]}) if cell.model else cell for cell in cells
    ]


def cell_key(cell: Cell) -> tuple:
    """The order of cells everywhere: benchmark, condition, model, method, then path."""
    return cell.benchmark, cell.condition, cell.model, method_order(cell.method), str(cell.path)
