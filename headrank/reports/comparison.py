"""Several runs side by side: means with intervals, paired tests against one baseline or all pairs, and their renderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.measures import Evaluation
from headrank.evaluation.significance import Test, bootstrap_interval, holm, paired_test

ALL_PAIRS = "all"


@dataclass(frozen=True)
class Settings:
    """How uncertainty is computed; written into every JSON result."""

    test: Test = "randomisation"
    level: float = 0.95
    resamples: int = 10_000
    permutations: int = 100_000
    seed: int = 0


@dataclass(frozen=True)
class Pairing:
    """One paired comparison under one measure: challenger minus baseline."""

    measure: str
    challenger: str
    baseline: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    p_holm: float
    wins: int
    losses: int
    ties: int


@dataclass(frozen=True)
class Comparison:
    """Runs in the given order with their intervals and pairings."""

    evaluations: Mapping[str, Evaluation]
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]  # run -> measure -> (low, high)
    pairings: tuple[Pairing, ...]
    settings: Settings

    @property
    def measures(self) -> list[str]:
        """Measure names in the order asked for."""
        return list(next(iter(self.evaluations.values())).values)

    def to_dict(self, per_query: bool = False) -> dict[str, Any]:
        """Plain values for JSON; per-query values only when asked for."""
        runs = {}
        for name, evaluation in self.evaluations.items():
            row: dict[str, Any] = {
                "measures": evaluation.means(),
                "intervals": {measure: list(interval) for measure, interval in self.intervals[name].items()},
                "num_queries": len(evaluation.values[self.measures[0]]),
                "num_missing": evaluation.num_missing,
                "num_unjudged": evaluation.num_unjudged,
                "num_tied": evaluation.num_tied,
            }
            if per_query:
                row["per_query"] = {measure: dict(values) for measure, values in evaluation.values.items()}
            runs[name] = row
        return {"settings": vars(self.settings).copy(), "runs": runs, "comparisons": [vars(pairing) for pairing in self.pairings]}


def compare(evaluations: Mapping[str, Evaluation], settings: Settings | None = None, baseline: str | None = None) -> Comparison:
    """Intervals for every run and paired tests of each other run against ``baseline`` (the first by default).

    ``baseline="all"`` tests every pair. Holm's correction covers all pairings of one measure, which is one family. Runs
    that do not count the same queries (missing="skip") are paired on the queries both have.
    """
    settings = settings or Settings()
    names = list(evaluations)
    if baseline is not None and baseline != ALL_PAIRS and baseline not in evaluations:
        raise InputError(f"baseline {baseline!r} is not one of the runs: {', '.join(names)}")
    reference = baseline or names[0]
    pairs = list(combinations(names, 2)) if baseline == ALL_PAIRS else [(reference, name) for name in names if name != reference]
    measures = list(next(iter(evaluations.values())).values)
    intervals = {
        name: {
            measure: bootstrap_interval(
                list(evaluation.values[measure].values()), level=settings.level, resamples=settings.resamples, seed=settings.seed
            )
            for measure in measures
        }
        for name, evaluation in evaluations.items()
    }
    pairings = []
    for measure in measures:
        rows = [_pair(evaluations, measure, first, second, settings) for first, second in pairs]
        corrected = holm([row["p_value"] for row in rows])
        pairings += [Pairing(**row, p_holm=p_holm) for row, p_holm in zip(rows, corrected, strict=True)]
    return Comparison(evaluations, intervals, tuple(pairings), settings)


def _pair(evaluations: Mapping[str, Evaluation], measure: str, baseline: str, challenger: str, settings: Settings) -> dict[str, Any]:
    before, after = evaluations[baseline].values[measure], evaluations[challenger].values[measure]
    shared = [query_id for query_id in before if query_id in after]
    if not shared:
        raise InputError(f"runs {baseline!r} and {challenger!r} have no query in common")
    first, second = [before[query_id] for query_id in shared], [after[query_id] for query_id in shared]
    differences = [new - old for new, old in zip(second, first, strict=True)]
    return {
        "measure": measure,
        "challenger": challenger,
        "baseline": baseline,
        "difference": sum(differences) / len(differences),
        "interval": bootstrap_interval(differences, level=settings.level, resamples=settings.resamples, seed=settings.seed),
        "p_value": paired_test(second, first, settings.test, resamples=settings.permutations, seed=settings.seed),
        "wins": sum(value > 0 for value in differences),
        "losses": sum(value < 0 for value in differences),
        "ties": sum(value == 0 for value in differences),
    }


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


def scale_of(measure: str) -> int:
    """What people's tables multiply by: fractions become percentages, counts (NumRet, NumRel) stay."""
    return 1 if measure.startswith("Num") else 100


def _query_rows(comparison: Comparison) -> list[list[str]]:
    """A header and a row a query: its value under every measure of every run, empty where a run does not count it."""
    columns = {
        f"{name} {measure}": {query_id: scale_of(measure) * value for query_id, value in evaluation.values[measure].items()}
        for name, evaluation in comparison.evaluations.items()
        for measure in comparison.measures
    }
    query_ids = dict.fromkeys(query_id for values in columns.values() for query_id in values)
    rows = [[f"{values[query_id]:.2f}" if query_id in values else "" for values in columns.values()] for query_id in query_ids]
    return [["query", *columns], *([query_id, *row] for query_id, row in zip(query_ids, rows, strict=True))]


def _table(rows: Sequence[Sequence[str]], style: str) -> str:
    """A header row and body rows; the first column is left-aligned text, the rest follow the widest entry."""
    if style == "markdown":
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines = ["| " + " | ".join(row) + " |" for row in escaped]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
