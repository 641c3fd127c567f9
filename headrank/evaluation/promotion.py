"""Middle-to-front promotion: does the score spread in the middle zone bring the right documents to the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from headrank.evaluation.homogenisation import RELEVANT_FROM, middle_zone
from headrank.evaluation.scored_lists import QueryScores


@dataclass(frozen=True)
class Promotion:
    """Counts over all lists of one benchmark: middle-zone documents, and those of them that reached the top
    quartile.
    """

    relevant: int
    relevant_promoted: int
    irrelevant: int
    irrelevant_promoted: int

    @property
    def relevant_rate(self) -> float | None:
        """Share of relevant middle-zone documents that were promoted (higher is better); None without any."""
        return self.relevant_promoted / self.relevant if self.relevant else None

    @property
    def irrelevant_rate(self) -> float | None:
        """Share of irrelevant middle-zone documents that were promoted (lower is better); None without any."""
        return self.irrelevant_promoted / self.irrelevant if self.irrelevant else None

    @property
    def selectivity_gap(self) -> float | None:
        """Relevant minus irrelevant rate, as a fraction (0.431 is the paper's 43.1 percentage points)."""
        if self.relevant_rate is None or self.irrelevant_rate is None:
            return None
        return self.relevant_rate - self.irrelevant_rate


def promotion(rows: Sequence[QueryScores], *, relevant_from: int = RELEVANT_FROM) -> Promotion:
    """Pool the middle-zone documents (retrieval ranks in the 25th-75th percentile) of all judged lists and count those
    whose new rank is in the top quartile (new rank <= N/4). Documents that nobody judged count as irrelevant, as in
    every measure; lists without any judgement are left out.
    """
    counts = [0, 0, 0, 0]
    for row in rows:
        if row.grades is None:
            continue
        in_zone = middle_zone(row.ranks)
        for is_middle, new_rank, grade in zip(in_zone, row.new_ranks(), row.grades, strict=True):
            # the zone is the retriever's, the quartile the new ranking's
            if is_middle:
                offset = 0 if (grade or 0) >= relevant_from else 2
                counts[offset] += 1
                counts[offset + 1] += 4 * new_rank <= len(row.ranks)
    return Promotion(*counts)


def mean_rates(benchmarks: Iterable[Sequence[Promotion]]) -> tuple[float, float, float] | None:
    """Relevant rate, irrelevant rate and gap: averaged over the seeds of each benchmark, then over benchmarks (each
    counts once), as the paper's figure does.

    Seeds and benchmarks that lack either kind of document are left out; None when nothing is left.
    """
    whole = [[entry for entry in seeds if entry.selectivity_gap is not None] for seeds in benchmarks]
    if not any(whole):
        return None
    relevant = mean(mean(entry.relevant_rate or 0.0 for entry in seeds) for seeds in whole if seeds)
    irrelevant = mean(mean(entry.irrelevant_rate or 0.0 for entry in seeds) for seeds in whole if seeds)
    return relevant, irrelevant, relevant - irrelevant
