"""Several runs compared: means with intervals, paired tests against one baseline or of all pairs."""

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
        return {
            "settings": vars(self.settings).copy(),
            "runs": runs,
            "comparisons": [vars(pairing) for pairing in self.pairings],
        }


def compare(
    evaluations: Mapping[str, Evaluation], settings: Settings | None = None, baseline: str | None = None
) -> Comparison:
    """Intervals for every run and paired tests of each other run against ``baseline`` (the first by default).

    ``baseline="all"`` tests every pair. Holm's correction covers all pairings of one measure, which is one family. Runs
    that do not count the same queries (missing="skip") are paired on the queries both have.
    """
    settings = settings or Settings()
    names = list(evaluations)
    if baseline is not None and baseline != ALL_PAIRS and baseline not in evaluations:
        raise InputError(f"baseline {baseline!r} is not one of the runs: {', '.join(names)}")
    reference = baseline or names[0]
    pairs = (
        list(combinations(names, 2))
        if baseline == ALL_PAIRS
        else [(reference, name) for name in names if name != reference]
    )
    measures = list(next(iter(evaluations.values())).values)
    intervals = {
        name: {
            measure: bootstrap_interval(
                list(evaluation.values[measure].values()),
                level=settings.level,
                resamples=settings.resamples,
                seed=settings.seed,
            )
            for measure in measures
        }
        for name, evaluation in evaluations.items()
    }
    pairings = []
    for measure in measures:
        rows = [_pair(evaluations, measure, first, second, settings) for first, second in pairs]
        # per measure: measures of one run are no independent hypotheses
        corrected = holm([row["p_value"] for row in rows])
        pairings += [Pairing(**row, p_holm=p_holm) for row, p_holm in zip(rows, corrected, strict=True)]
    return Comparison(evaluations, intervals, tuple(pairings), settings)


def _pair(
    evaluations: Mapping[str, Evaluation], measure: str, baseline: str, challenger: str, settings: Settings
) -> dict[str, Any]:
    before, after = evaluations[baseline].values[measure], evaluations[challenger].values[measure]
    # paired by query: a difference of means over different queries would be about the queries
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
        "interval": bootstrap_interval(
            differences, level=settings.level, resamples=settings.resamples, seed=settings.seed
        ),
        "p_value": paired_test(second, first, settings.test, resamples=settings.permutations, seed=settings.seed),
        "wins": sum(value > 0 for value in differences),
        "losses": sum(value < 0 for value in differences),
        "ties": sum(value == 0 for value in differences),
    }


def scale_of(measure: str) -> int:
    """What people's tables multiply by: fractions become percentages, counts (NumRet, NumRel) stay."""
    return 1 if measure.startswith("Num") else 100


def mean_over_seeds(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One system out of several seeds: each query's mean, on the queries that all seeds have."""
    shared = [query_id for query_id in seeds[0] if all(query_id in values for values in seeds)]
    return {query_id: sum(values[query_id] for values in seeds) / len(seeds) for query_id in shared}
