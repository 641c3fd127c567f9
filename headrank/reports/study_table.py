"""The table that a study ends with: a row per method on each benchmark, with its interval, its time and the layers
that it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headrank.evaluation.measures import evaluate_run
from headrank.evaluation.significance import bootstrap_interval
from headrank.experiments.cells import Cell
from headrank.formats import Candidate, Qrels, Run
from headrank.methods import METHODS
from headrank.reports.grids import Grid, GridRow, Text


@dataclass(frozen=True)
class TableRow:
    """Cells that are one row: those of several training seeds, or a single one."""

    title: str
    cells: tuple[Cell, ...]


def study_grid(caption: str, rows: Sequence[TableRow], measure: str) -> Grid:
    """The rows of one benchmark, depth and order; the best mean is marked."""
    means = [fmean(_per_query(row, measure).values()) for row in rows]
    headers = ("", measure, "95% interval", "seconds per query", "layers used")
    lines = [
        GridRow(_entries(row, rows, measure, is_best=mean == max(means))) for row, mean in zip(rows, means, strict=True)
    ]
    return Grid(caption, headers, tuple(lines))


def _per_query(row: TableRow, measure: str) -> dict[str, float]:
    """Every query's value, its mean over the seeds."""
    seeds = [cell.per_query(measure) for cell in row.cells]
    return {query_id: fmean(seed[query_id] for seed in seeds if query_id in seed) for query_id in seeds[0]}


def _entries(row: TableRow, rows: Sequence[TableRow], measure: str, *, is_best: bool) -> tuple[Text | str, ...]:
    values = list(_per_query(row, measure).values())
    low, high = bootstrap_interval(values)
    facts = row.cells[0].metrics
    title = f"{row.title} ({len(row.cells)} seeds)" if len(row.cells) > 1 else row.title
    value = Text(f"{100 * fmean(values):.1f}", "best" if is_best else "")
    layers = "-" if not facts.get("layers_used") else f"{facts['layers_used']} of {facts['num_layers']}"
    return Text(title), value, Text(f"{100 * low:.1f} - {100 * high:.1f}"), Text(_seconds(facts, rows)), Text(layers)


def _seconds(facts: Any, rows: Sequence[TableRow]) -> str:
    """Of one query; a method that was read off another's forward has no time of its own."""
    if METHODS[str(facts["method"]).partition("+")[0]].kind == "first-stage":
        return "-"
    if facts["seconds_per_query"] is not None:
        return f"{facts['seconds_per_query']:.2f}"
    for other in rows:
        cell = other.cells[0]
        if (
            cell.model == facts["model"]
            and cell.metrics.get("reads_the_whole_forward")
            and cell.metrics["seconds_per_query"]
        ):
            return f"with {METHODS[cell.method.partition('+')[0]].title}"
    return "shared"


def best_possible(run: Run, qrels: Qrels, depth: int, measure: str) -> float:
    """The ceiling of reranking: the same candidates in the order of their grades."""
    ordered = {}
    for query_id, rows in run.items():
        doc_ids = [row.doc_id for row in rows]
        grades = qrels.get(query_id, {})
        doc_ids = sorted(doc_ids[:depth], key=lambda doc_id: -grades.get(doc_id, 0)) + doc_ids[depth:]
        ordered[query_id] = [Candidate(doc_id, rank, -float(rank)) for rank, doc_id in enumerate(doc_ids, start=1)]
    return evaluate_run(ordered, qrels, [measure], query_ids=set(run)).mean(measure)
