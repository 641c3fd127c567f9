"""Paired tests of the rows of a matrix. The seeds of a row are one system: its value on a query is their mean.

So a row of three seeds is tested once, over queries; how far the seeds lie apart is the ± of the tables beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from headrank.evaluation.cell_analyses import method_kind
from headrank.evaluation.cells import Cell, method_name, method_order
from headrank.evaluation.comparison import Comparison, Pairing, Settings, compare
from headrank.evaluation.measures import Evaluation
from headrank.evaluation.page import Grid
from headrank.evaluation.verdict import p_text

RowKey = tuple[str, str]  # model ('' for the first stage, which has none) and method


def pool_seeds(cells: Sequence[Cell], measure: str) -> dict[RowKey, dict[str, float]]:
    """Each row's value on a query, the mean over its seeds, on the queries that all of them have; first stage first, then table order."""
    found: dict[RowKey, list[dict[str, float]]] = {}
    for cell in sorted(cells, key=lambda cell: (method_kind(cell.method) != "first-stage", cell.model, method_order(cell.method))):
        values = cell.per_query(measure)
        if values:
            model = "" if method_kind(cell.method) == "first-stage" else cell.model
            found.setdefault((model, cell.method), []).append(values)
    pooled = {}
    for row, seeds in found.items():
        shared = [query_id for query_id in seeds[0] if all(query_id in values for values in seeds)]
        pooled[row] = {query_id: mean(values[query_id] for values in seeds) for query_id in shared}
    return {row: values for row, values in pooled.items() if values}


def opponents(rows: Mapping[RowKey, Mapping[str, float]]) -> list[RowKey]:
    """Whom every row is tested against: the first stage, the best attention method of others, HeadRank's own heads untrained."""
    first = [row for row in rows if method_kind(row[1]) == "first-stage"][:1]
    others = [row for row in rows if method_kind(row[1]) == "attention" and not row[1].startswith("headrank")]
    best = [max(others, key=lambda row: mean(rows[row].values()))] if others else []
    return [*first, *best, *(row for row in rows if row[1] == "headrank+untrained")]


def paired_test_grids(cells: Sequence[Cell], settings: Settings | None = None) -> list[Grid]:
    """A table of tests for each benchmark of one condition, on its leading measure; none where there is nobody to meet."""
    grids = []
    for benchmark in dict.fromkeys(cell.benchmark for cell in cells):
        chosen = [cell for cell in cells if cell.benchmark == benchmark]
        measure = next(iter(chosen[0].metrics["measures"]))
        rows = pool_seeds(chosen, measure)
        against = [row for row in opponents(rows) if len(rows) > 1]
        if against:
            grids.append(_grid(benchmark, measure, rows, against, settings or Settings()))
    return grids


def _grid(benchmark: str, measure: str, rows: Mapping[RowKey, Mapping[str, float]], against: Sequence[RowKey], settings: Settings) -> Grid:
    names = {row: _name(row) for row in rows}
    evaluations = {names[row]: Evaluation({measure: dict(values)}, 0, 0, 0) for row, values in rows.items()}
    meetings = {row: compare(evaluations, settings, names[row]) for row in against}
    return Grid(
        f"{benchmark}, {measure}: mean, and difference from the row named above it over the queries both have, with {settings.level:.0%} "
        f"bootstrap interval and p of a paired {settings.test} test (in brackets with Holm's correction over the column).",
        ("", "queries", measure, *(f"against {names[row]}" for row in against)),
        tuple(
            (names[row], str(len(values)), f"{100 * mean(values.values()):.1f}", *(_met(meetings[other], names[row]) for other in against))
            for row, values in rows.items()
        ),
    )


def _name(row: RowKey) -> str:
    return " ".join(part for part in (row[0], method_name(row[1])) if part)


def _met(comparison: Comparison, challenger: str) -> str:
    """One cell of the grid; empty where a row would meet itself."""
    found: list[Pairing] = [pairing for pairing in comparison.pairings if pairing.challenger == challenger]
    if not found:
        return ""
    low, high = found[0].interval
    return (
        f"{100 * found[0].difference:+.1f} [{100 * low:.1f}, {100 * high:.1f}], {p_text(found[0].p_value)} "
        f"({p_text(found[0].p_holm).removeprefix('p ').removeprefix('= ')})"
    )
