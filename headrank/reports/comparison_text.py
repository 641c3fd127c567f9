"""What `headrank evaluate` prints: runs with intervals, paired tests, and per-query values on request."""

from __future__ import annotations

from collections.abc import Sequence

from headrank.evaluation.comparison import Comparison, scale_of
from headrank.reports.grids import Grid
from headrank.reports.table_text import to_markdown, to_text


def render(comparison: Comparison, style: str, *, per_query: bool = False) -> str:
    """The comparison as ``text`` (aligned columns) or ``markdown``; values times 100, intervals in brackets."""
    runs = [["run", *comparison.measures, "queries"]]
    for name, evaluation in comparison.evaluations.items():
        row = [name]
        for measure in comparison.measures:
            (low, high), scale = comparison.intervals[name][measure], scale_of(measure)
            row.append(f"{scale * evaluation.mean(measure):.2f} [{scale * low:.2f}, {scale * high:.2f}]")
        runs.append([*row, str(len(evaluation.values[comparison.measures[0]]))])
    parts = [_table(runs, style)]
    if comparison.pairings:
        tests = [["measure", "run", "against", "difference", "p", "p (Holm)", "won/lost/tied"]]
        for pairing in comparison.pairings:
            (low, high), scale = pairing.interval, scale_of(pairing.measure)
            tests.append(
                [
                    pairing.measure,
                    pairing.challenger,
                    pairing.baseline,
                    f"{scale * pairing.difference:+.2f} [{scale * low:+.2f}, {scale * high:+.2f}]",
                    f"{pairing.p_value:.4f}",
                    f"{pairing.p_holm:.4f}",
                    f"{pairing.wins}/{pairing.losses}/{pairing.ties}",
                ]
            )
        parts.append(_table(tests, style))
    if per_query:
        parts.append(_table(_query_rows(comparison), style))
    settings = comparison.settings
    parts.append(
        f"Intervals: {100 * settings.level:g}% percentile bootstrap over queries, {settings.resamples} resamples. "
        f"Tests: paired {settings.test}, two-sided, Holm-corrected within each measure. Seed {settings.seed}."
    )
    return "\n\n".join(parts) + "\n"


def _query_rows(comparison: Comparison) -> list[list[str]]:
    """A header and a row per query: its value under every measure of every run, empty where a run does not count it."""
    columns = {
        f"{name} {measure}": {
            query_id: scale_of(measure) * value for query_id, value in evaluation.values[measure].items()
        }
        for name, evaluation in comparison.evaluations.items()
        for measure in comparison.measures
    }
    query_ids = dict.fromkeys(query_id for values in columns.values() for query_id in values)
    rows = [
        [f"{values[query_id]:.2f}" if query_id in values else "" for values in columns.values()]
        for query_id in query_ids
    ]
    return [["query", *columns], *([query_id, *row] for query_id, row in zip(query_ids, rows, strict=True))]


def _table(rows: Sequence[Sequence[str]], style: str) -> str:
    """The first row is the header."""
    grid = Grid("", tuple(rows[0]), tuple(map(tuple, rows[1:])))
    return (to_markdown(grid) if style == "markdown" else to_text(grid)).rstrip("\n")
