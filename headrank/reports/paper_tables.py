"""From cells on disk to the paper's tables: Table 1 (NDCG@10), Table 2 (multi-hop recall), ablations, and our own
overview.

The paper's numbers arrive as data from the caller (``TableSpec.published``), so this module knows none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from headrank.errors import InputError
from headrank.experiments.cells import Cell
from headrank.methods import method_kind, method_name, method_order
from headrank.reports.tables import Column, Row, Table, Value, short_measure

FIRST_STAGE = "First stage"


@dataclass(frozen=True)
class Published:
    """One number of the paper, in percent."""

    model: str
    method: str
    benchmark: str
    measure: str
    value: float


@dataclass(frozen=True)
class TableSpec:
    """The frame of one of the paper's tables: its columns, its published numbers and success rates (model, method)
    -> percent.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    published: tuple[Published, ...] = ()
    published_success: Mapping[tuple[str, str], float] | None = None
    methods: tuple[str, ...] | None = None  # only these method names (ablation rows); None takes all
    source: str = "the paper"  # where the published numbers stand, with their conditions
    depths: tuple[int, ...] = ()  # of the lists behind the published numbers; several where the table mixes them
    has_average: bool = True
    has_success_rate: bool = True


def build_table(spec: TableSpec, cells: Sequence[Cell], *, with_published: bool = True) -> Table:
    """One paper table from cells that may be compared; the paper's rows follow ours of the same model and method, and
    name their depth where it is not that of our cells.

    Cells that differ only in their seed become one row with mean and deviation.
    """
    ours = _our_rows(cells, spec.columns, spec.methods)
    depths = _depths_of(cells, spec.columns)
    paper = _paper_rows(spec, set(depths.values())) if with_published else []
    rows = sorted([*ours, *paper], key=lambda row: _row_key(row, ours))
    notes = (f"Rows marked as the paper's are published numbers, not ours: {spec.source}.",) if paper else ()
    return Table(
        spec.name,
        spec.title,
        spec.columns,
        tuple(map(_shown, rows)),
        (*notes, *_depth_note(depths), *_seed_note(ours)),
        has_average=spec.has_average,
        has_success_rate=spec.has_success_rate,
    )


def overview_table(
    cells: Sequence[Cell], title: str, name: str = "overview", measures: Sequence[str] | None = None
) -> Table:
    """Everything we ran under one condition: a column for the leading measure of each benchmark (or for all
    ``measures``).
    """
    columns: dict[tuple[str, str], Column] = {}
    for cell in cells:
        for measure in measures or list(cell.metrics["measures"])[:1]:
            if cell.value(measure) is not None:
                columns.setdefault(
                    (cell.benchmark, measure), Column(cell.benchmark, measure, short_measure(measure), cell.benchmark)
                )
    rows = _our_rows(cells, list(columns.values()), None)
    ordered = sorted(rows, key=lambda row: _row_key(row, rows))
    has_success = any(row.success_rate is not None for row in rows)
    notes = (*_depth_note(_depths_of(cells, list(columns.values()))), *_seed_note(rows))
    return Table(name, title, tuple(columns.values()), tuple(map(_shown, ordered)), notes, has_success_rate=has_success)


def _our_rows(cells: Iterable[Cell], columns: Sequence[Column], methods: tuple[str, ...] | None) -> list[Row]:
    """One row for each (model, method) that has at least one of the columns; seeds are averaged."""
    wanted = {column.key for column in columns}
    found: dict[tuple[str, str], dict[tuple[str, str], list[Cell]]] = {}
    success: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        identity = (cell.model, cell.method)
        if methods is not None and cell.method not in methods:
            continue
        for measure in cell.metrics["measures"]:
            if (cell.benchmark, measure) in wanted:
                found.setdefault(identity, {}).setdefault((cell.benchmark, measure), []).append(cell)
        if identity in found and cell.metrics.get("success_rate") is not None:
            success.setdefault(identity, []).append(100 * float(cell.metrics["success_rate"]))
    rows = []
    for identity, by_column in found.items():
        rates = success.get(identity)
        rows.append(
            Row(
                *identity,
                {key: _over_seeds(seeds, key[1]) for key, seeds in by_column.items()},
                success_rate=sum(rates) / len(rates) if rates else None,
                competes=not _is_first_stage(identity[1]),
            )
        )
    return rows


def _over_seeds(cells: Sequence[Cell], measure: str) -> Value:
    """Mean and deviation of one row's cells on one benchmark; cells that are not different seeds are refused, not
    averaged.
    """
    for one, other in combinations(cells, 2):
        seeds = one.metrics.get("seed"), other.metrics.get("seed")
        # two runs of one seed averaged would look like a smaller deviation
        if None in seeds or seeds[0] == seeds[1]:
            row = f"{one.model} {method_name(one.method)}".strip()
            raise InputError(
                f"{one.path} and {other.path}: both are {row} on {one.benchmark}, and not of two seeds; "
                "label one METHOD+VARIANT or move one away"
            )
    return Value.over_seeds([100 * float(cell.metrics["measures"][measure]) for cell in cells])


def _paper_rows(spec: TableSpec, our_depths: set[int]) -> list[Row]:
    """The published rows; they name their depth where it is not ours (a table without any of our depths is of one
    known depth).
    """
    # published numbers at another depth beside ours would be read as a comparison
    at = "" if not spec.depths or set(spec.depths) == our_depths else "top " + " and ".join(map(str, spec.depths))
    values: dict[tuple[str, str], dict[tuple[str, str], Value]] = {}
    for entry in spec.published:
        values.setdefault((entry.model, entry.method), {})[entry.benchmark, entry.measure] = Value(entry.value)
    rates = spec.published_success or {}
    return [
        Row(*identity, found, "paper", rates.get(identity), competes=not _is_first_stage(identity[1]), depth=at)
        for identity, found in values.items()
    ]


def _depths_of(cells: Sequence[Cell], columns: Sequence[Column]) -> dict[str, int]:
    """The depth of each of the columns' benchmarks, that of the rerankers where there are any."""
    wanted = {column.benchmark for column in columns}
    depths: dict[str, int] = {}
    for cell in sorted(cells, key=lambda cell: not _is_first_stage(cell.method)):
        if cell.benchmark in wanted:
            depths[cell.benchmark] = cell.condition[0]
    return depths


def _depth_note(depths: Mapping[str, int]) -> tuple[str, ...]:
    """Which benchmark stands at which depth, where that differs."""
    by_depth: dict[int, list[str]] = {}
    for benchmark, depth in depths.items():
        by_depth.setdefault(depth, []).append(benchmark)
    told = "; ".join(
        f"{depth} for {', '.join(sorted(names))}" for depth, names in sorted(by_depth.items(), reverse=True)
    )
    return (f"Candidates per query: {told}.",) if len(by_depth) > 1 else ()


def _is_first_stage(method: str) -> bool:
    return method_kind(method) == "first-stage"


def _row_key(row: Row, ours: Sequence[Row]) -> tuple:
    """First stage, then our models, then models only the paper has; methods in the paper's order; ours before the
    paper's.
    """
    is_our_model = any(row.model == other.model for other in ours)
    model = "" if _is_first_stage(row.method) else row.model
    return not _is_first_stage(row.method), not is_our_model, _size_key(model), method_order(row.method), row.source


def _size_key(model: str) -> tuple[float, str]:
    return parameters_in_name(model) or 0.0, model


def parameters_in_name(model: str) -> float | None:
    """The number of parameters that a model's name tells: 'Qwen3-0.6B' -> 6e8, 'SmolLM2-135M' -> 1.35e8; None if it
    tells none.
    """
    import re

    found = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([BM])(?![A-Za-z])", model.replace("-", " ").replace("_", " "))
    return float(found[-1][0]) * {"B": 1e9, "M": 1e6}[found[-1][1]] if found else None


def _shown(row: Row) -> Row:
    """Names for people."""
    model = FIRST_STAGE if _is_first_stage(row.method) else row.model
    return replace(row, model=model, method=method_name(row.method))


def _seed_note(rows: Sequence[Row]) -> tuple[str, ...]:
    has_seeds = any(value.deviation is not None for row in rows for value in row.values.values())
    return ("± is the standard deviation over seeds.",) if has_seeds else ()
