"""Query-focused retrieval heads (QR): the calibrated mass on gold documents, or the NDCG of a head on its own.

No causal interventions, whatever the HeadRank paper says. QR's score of a head sums the gold documents of a query and
averages over queries, which ranks heads exactly as the mean over all gold documents does; its released detection for
BEIR ranks heads by the NDCG@10 each reaches alone, on shuffled lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.method.list_places import NDCG_DEPTH, ndcg
from headrank.selection.selection import RunningMean, SelectionContext
from headrank.selection.statistics import HeadStatistics


class QRSelection:
    """Mean calibrated mass on gold documents; top 16 heads."""

    name, top_k = "qr", 16

    def __init__(self, gold_grade: int = 1, is_calibrated: bool = True, per_query: bool = False) -> None:
        """Documents of at least ``gold_grade`` are gold; uncalibrated masses are only a switch for experiments."""
        if gold_grade < 1:
            raise InputError(f"`gold_grade` {gold_grade} must be at least 1")
        self.gold_grade, self.is_calibrated, self.masses = gold_grade, is_calibrated, RunningMean(per_query)

    def settings(self) -> dict[str, Any]:
        """What is gold, and the kind of mass."""
        return {"gold_grade": self.gold_grade, "is_calibrated": self.is_calibrated, "per_query": self.masses.by_group}

    def uses(self, context: SelectionContext) -> bool:
        """Whether a gold document is in the list."""
        return bool(self._gold(context))

    def add(self, context: SelectionContext, statistics: HeadStatistics) -> None:
        """One value for every gold document."""
        masses_LHN = statistics.masses(self.is_calibrated).numpy()
        for document in self._gold(context):
            self.masses.add(masses_LHN[..., document], (context.collection, context.query_id))

    def columns(self) -> dict[str, np.ndarray]:
        """The mean mass."""
        return {"gold_mass": self.masses.value(f"a document of grade {self.gold_grade} or above")}

    def _gold(self, context: SelectionContext) -> list[int]:
        return [index for index, grade in enumerate(context.grades) if grade is not None and grade >= self.gold_grade]


class QRNdcgSelection:
    """NDCG@10 of each head as a ranker of its own, on calibrated masses; top 16 heads."""

    name, top_k = "qr-ndcg", 16

    def __init__(self, is_calibrated: bool = True) -> None:
        """Uncalibrated masses are only a switch for experiments."""
        self.is_calibrated, self.measure = is_calibrated, RunningMean()

    def settings(self) -> dict[str, Any]:
        """The kind of mass and the cut-off."""
        return {"is_calibrated": self.is_calibrated, "ndcg_depth": NDCG_DEPTH}

    def uses(self, context: SelectionContext) -> bool:
        """Whether a relevant document is in the list."""
        return any(grade for grade in context.grades)

    def add(self, context: SelectionContext, statistics: HeadStatistics) -> None:
        """The NDCG of all heads on this context."""
        self.measure.add(ndcg(statistics.masses(self.is_calibrated).numpy(), context.grades))

    def columns(self) -> dict[str, np.ndarray]:
        """The mean NDCG."""
        return {"ndcg": self.measure.value("a relevant document")}
