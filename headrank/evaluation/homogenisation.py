"""Attention score homogenisation: how flat are the scores in the middle of a list, and along it.

*Middle zone*: documents at retrieval ranks in the 25th-75th percentile, by the rule of the loss
(``list_places.middle_places``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrank.evaluation.scored_lists import QueryScores
from headrank.method.list_places import middle_places

RELEVANT_FROM = 1  # the lowest grade that counts as relevant; the paper does not say, this is ours


def middle_zone(ranks: Sequence[int]) -> np.ndarray:
    """Boolean mask of the middle zone; gaps in the ranks do not matter, only the order."""
    is_middle = np.zeros(len(ranks), bool)
    is_middle[np.argsort(np.asarray(ranks), kind="stable")[middle_places(len(ranks))]] = True
    return is_middle


def normalise_scores(scores: Sequence[float]) -> np.ndarray:
    """Min-max over the whole list, so that every list spans [0, 1]; equal scores all become 0."""
    values = np.asarray(scores, dtype=np.float64)
    spread = values.max() - values.min() if values.size else 0.0
    return (values - values.min()) / spread if spread > 0 else np.zeros_like(values)


def middle_zone_std(scores: Sequence[float], ranks: Sequence[int]) -> float | None:
    """Normalised middle-zone standard deviation of one list: the population standard deviation of the
    min-max-normalised scores (over the whole list) of the documents in the middle zone. Higher is better, 0 is complete
    flatlining. None when the zone holds fewer than two documents.
    """
    zone = middle_zone(ranks)
    return float(normalise_scores(scores)[zone].std()) if zone.sum() >= 2 else None


def mean_middle_zone_std(rows: Sequence[QueryScores]) -> float | None:
    """The mean of ``middle_zone_std`` over the queries that have one; None when none has."""
    values = [value for row in rows if (value := middle_zone_std(row.scores, row.ranks)) is not None]
    return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class PositionCurve:
    """Mean normalised score at each place of the list, 1 to N; NaN where nothing was counted."""

    positions: np.ndarray  # [N]
    mean: np.ndarray  # [N]
    low: np.ndarray  # [N], 25th percentile over queries
    high: np.ndarray  # [N], 75th percentile
    relevant: np.ndarray  # [N], mean over relevant documents only
    irrelevant: np.ndarray  # [N], mean over the others


def score_by_position(
    rows: Sequence[QueryScores], *, by: str = "positions", relevant_from: int = RELEVANT_FROM
) -> PositionCurve | None:
    """Score by position: the mean over queries of the min-max-normalised score of the document at each place.

    ``by`` is "positions" (places in the prompt) or "ranks" (the retriever's). A flat curve whose relevant and
    irrelevant parts coincide is homogenisation; high ends with a low middle is 'lost in the middle'. Lists may differ
    in length. None when there are no rows.
    """
    if not rows:
        return None
    length = max(max(getattr(row, by)) for row in rows)
    values: list[list[float]] = [[] for _ in range(length)]
    relevant: list[list[float]] = [[] for _ in range(length)]
    irrelevant: list[list[float]] = [[] for _ in range(length)]
    for row in rows:
        grades = row.grades or (None,) * len(row.scores)
        for place, score, grade in zip(getattr(row, by), normalise_scores(row.scores), grades, strict=True):
            values[place - 1].append(score)
            if row.grades is not None:
                (relevant if (grade or 0) >= relevant_from else irrelevant)[place - 1].append(score)

    def over(bins: list[list[float]], quantile: float | None = None) -> np.ndarray:
        pick = np.mean if quantile is None else lambda scores: np.quantile(scores, quantile)
        return np.array([pick(scores) if scores else np.nan for scores in bins])

    return PositionCurve(
        np.arange(1, length + 1), over(values), over(values, 0.25), over(values, 0.75), over(relevant), over(irrelevant)
    )
