"""Paired tests of the rows of a matrix. The seeds of a row are one system: its value on a query is their mean.

So a row of three seeds is tested once, over queries; how far the seeds lie apart is the ± of the tables beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from headrank.errors import InputError
from headrank.evaluation.comparison import Comparison, Settings, compare, mean_over_seeds, scale_of
from headrank.evaluation.measures import Evaluation
from headrank.experiments.cells import Cell
from headrank.methods import method_kind, method_name, method_order
from headrank.reports.contests import p_text
from headrank.reports.grids import Grid

RowKey = tuple[str, str]  # model ('' for the first stage, which has none) and method


def pool_seeds(cells: Sequence[Cell], measure: str) -> dict[RowKey, dict[str, float]]:
    """Each row's value on a query, the mean over its seeds, on the queries that all of them have; first stage first,
    then table order.
    """
    found: dict[RowKey, list[dict[str, float]]] = {}
    for cell in sorted(
        cells, key=lambda cell: (method_kind(cell.method) != "first-stage", cell.model, method_order(cell.method))
    ):
        values = cell.per_query(measure)
        if values:
            found.setdefault(row_key(cell), []).append(values)
    pooled = {row: mean_over_seeds(seeds) for row, seeds in found.items()}
    return {row: values for row, values in pooled.items() if values}


def opponents(rows: Mapping[RowKey, Mapping[str, float]]) -> list[RowKey]:
    """Whom every row is tested against: the first stage, the best attention method of others, HeadRank's own heads
    untrained.
    """
    # one of them: a test against each would make Holm's correction stricter for all rows
    first = [row for row in rows if method_kind(row[1]) == "first-stage"][:1]
    others = [row for row in rows if method_kind(row[1]) == "attention" and not row[1].startswith("headrank")]
    # few easy queries are no best row
    best = [max(others, key=lambda row: (len(rows[row]), mean(rows[row].values())))] if others else []
    return [*first, *best, *(row for row in rows if row[1] == "headrank+untrained")]


def paired_test_grids(cells: Sequence[Cell], settings: Settings | None = None) -> list[Grid]:
    """A table of tests for each benchmark of one condition, on its leading measure; none where there is nobody to
    meet.
    """
    grids = []
    for benchmark in dict.fromkeys(cell.benchmark for cell in cells):
        chosen = [cell for cell in cells if cell.benchmark == benchmark]
        measure = next(iter(chosen[0].metrics["measures"]))
        rows = pool_seeds(chosen, measure)
        against = opponents(rows) if len(rows) > 1 else []
        if against:
            absent = [key for key in dict.fromkeys(map(row_key, chosen)) if key not in rows]
            grids.append(_grid(benchmark, measure, rows, against, absent, settings or Settings()))
    return grids


def pooled_test_grid(
    cells: Sequence[Cell], against: str | None = None, settings: Settings | None = None
) -> Grid | None:
    """One table of tests over the queries of all benchmarks together, as folds of a cross-validation want it.

    ``against`` is a method ('headrank+full') that every row is tested against besides the first stage; by default those
    of each benchmark. None where the benchmarks have no leading measure in common.
    """
    measures = {next(iter(cell.metrics["measures"])) for cell in cells}
    benchmarks = list(dict.fromkeys(cell.benchmark for cell in cells))
    if len(measures) != 1:
        return None
    (measure,) = measures
    rows: dict[RowKey, dict[str, float]] = {}
    for benchmark in benchmarks:
        for row, values in pool_seeds([cell for cell in cells if cell.benchmark == benchmark], measure).items():
            rows.setdefault(row, {}).update({f"{benchmark}/{query_id}": value for query_id, value in values.items()})
    chosen = opponents(rows)
    if against is not None:
        named = [row for row in rows if row[1] == against]
        if not named:
            raise InputError(
                f"no row {against!r} among the results: {', '.join(sorted({method for _, method in rows}))}"
            )
        chosen = [*(row for row in rows if method_kind(row[1]) == "first-stage"), *named]
    if len(rows) < 2 or not chosen:
        return None
    return _grid(f"{', '.join(benchmarks)} together", measure, rows, chosen, [], settings or Settings())


def _grid(
    benchmark: str,
    measure: str,
    rows: Mapping[RowKey, Mapping[str, float]],
    against: Sequence[RowKey],
    absent: Sequence[RowKey],
    settings: Settings,
) -> Grid:
    evaluations = {row: Evaluation({measure: dict(values)}, 0, 0, 0) for row, values in rows.items()}
    columns = []
    for opponent in against:
        # a row without a common query has no difference; compare() would refuse all of them
        sharing = {_name(row): evaluations[row] for row in rows if rows[row].keys() & rows[opponent].keys()}
        columns.append(compare(sharing, settings, _name(opponent)))
    caption = (
        f"{benchmark}, {measure}: means over queries (several seeds: each query's mean). Differences are over the "
        "queries both rows have, "
        f"with {settings.level:.0%} bootstrap interval, p of a paired {settings.test} test and, in brackets, the "
        "Holm-corrected p of the "
        "column. The best other attention method was chosen on these same queries."
    )
    if absent:
        caption += f" Without per-query {measure}, so not tested: {', '.join(map(_name, absent))}."
    lines = []
    for row, values in rows.items():
        value = f"{scale_of(measure) * mean(values.values()):.1f}"
        lines.append((_name(row), str(len(values)), value, *(format_comparison(column, row) for column in columns)))
    headers = ("Method", "queries", measure, *(f"minus {_name(row)}" for row in against))
    return Grid(caption, headers, tuple(lines))


def row_key(cell: Cell) -> RowKey:
    """The row of a cell; the first stage belongs to no model."""
    return "" if method_kind(cell.method) == "first-stage" else cell.model, cell.method


def _name(row: RowKey) -> str:
    return " ".join(part for part in (row[0], method_name(row[1])) if part)


def format_comparison(comparison: Comparison, row: RowKey) -> str:
    """One cell of the grid; empty where a row would meet itself or shares no query."""
    found = next((pairing for pairing in comparison.pairings if pairing.challenger == _name(row)), None)
    if found is None:
        return ""
    # no -0.0
    difference, low, high = (
        round(scale_of(found.measure) * value, 1) + 0.0 for value in (found.difference, *found.interval)
    )
    corrected = p_text(found.p_holm).removeprefix("p ").removeprefix("= ")
    return f"{difference:+.1f} [{low:.1f}, {high:.1f}], {p_text(found.p_value)} ({corrected})"
