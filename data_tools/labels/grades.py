"""From a teacher's scores to grades, so that ALPS applies to lists that nobody judged; pure functions on one list.

Quantiles are taken within a list: every list whose scores differ has every grade, also one without a good passage.
Thresholds are on the teacher's own scale: a list without a good passage has no high grade, and may have no pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrank.errors import InputError

QRELS_MODES = ("ignore", "keep", "positives")
DEFAULT_QUANTILES = (0.5, 0.75, 0.9)  # of 16 passages: 8 of grade 0, 4 of 1, 2 of 2, 2 of 3; ours


@dataclass(frozen=True)
class GradeSettings:
    """How scores become grades 0, 1, 2, ...: one level per boundary, boundaries ascending. ``qrels`` says what
    judgements add.

    ignore: the teacher alone. keep: a judged passage keeps its judged grade. positives: a passage that is judged
    relevant gets the top grade, for collections of which only a few relevant passages are known and a grade of 0 means
    little.
    """

    by: str = "quantiles"
    boundaries: tuple[float, ...] = DEFAULT_QUANTILES
    qrels: str = "ignore"

    def __post_init__(self) -> None:
        if self.by not in ("quantiles", "thresholds"):
            raise InputError(f"grades by {self.by!r}: not one of quantiles, thresholds")
        if self.qrels not in QRELS_MODES:
            raise InputError(f"qrels {self.qrels!r}: not one of {', '.join(QRELS_MODES)}")
        is_ascending = all(low < high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False))
        if not self.boundaries or not is_ascending or not all(map(math.isfinite, self.boundaries)):
            raise InputError(f"{self.by} {_listed(self.boundaries)}: must be finite, at least one, and ascending")
        if self.by == "quantiles" and not (self.boundaries[0] > 0 and self.boundaries[-1] < 1):
            raise InputError(f"quantiles {_listed(self.boundaries)}: must lie between 0 and 1")

    @property
    def top_grade(self) -> int:
        """The highest grade: one per boundary."""
        return len(self.boundaries)


def grades_from_scores(scores: Sequence[float], settings: GradeSettings) -> list[int]:
    """The grade of every score of one list: how many boundaries it reaches. Equal scores have equal grades."""
    values = np.asarray(scores, np.float64)
    if not len(values):
        return []
    levels = np.asarray(settings.boundaries)
    if settings.by == "quantiles":
        levels = np.quantile(values, levels, method="higher")  # a score of the list, so that ties fall on one side
    return (values[:, None] >= levels[None, :]).sum(axis=1).tolist()


def merged_grade(teacher: int | None, judged: int | None, settings: GradeSettings) -> tuple[int | None, str | None]:
    """The grade of a passage that the teacher, the judges, both or nobody graded, and who gave it: 'teacher' or
    'qrels'.
    """
    if settings.qrels == "keep" and judged is not None:
        return max(judged, 0), "qrels"
    if settings.qrels == "positives" and judged is not None and judged > 0:
        return settings.top_grade, "qrels"
    return teacher, None if teacher is None else "teacher"


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values) or "(none)"
