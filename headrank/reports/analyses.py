"""The analyses of the paper over a set of cells under one condition: deviations, promotion, curves and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from headrank.evaluation.homogenisation import PositionCurve, mean_middle_zone_std, score_by_position
from headrank.evaluation.promotion import Promotion, mean_rates, promotion
from headrank.evaluation.scored_lists import QueryScores
from headrank.experiments.cells import Cell
from headrank.methods import method_kind, method_name, method_order
from headrank.reports.pareto import CostPoint

Panels = dict[str, dict[str, dict[str, float]]]  # panel -> row -> benchmark -> value
Rates = tuple[float, float, float]  # relevant rate, irrelevant rate, gap


@dataclass(frozen=True)
class PlacedCell:
    """A cell and where it goes in figures: a panel (a model, or the benchmark of a run page) and a row in it."""

    panel: str
    row: str
    cell: Cell


class CellAnalyses:
    """Reads each cell's scores once and answers the paper's questions about them. First-stage cells have no scores
    worth analysing.
    """

    def __init__(self, placed: Sequence[PlacedCell], first_stage: Sequence[Cell], names: Mapping[str, str]) -> None:
        """``names`` are the rows' names for people."""
        self.placed, self.first_stage, self.names = placed, first_stage, names
        self.methods = {one.row: one.cell.method for one in placed}
        self._scores: dict[str, list[QueryScores]] = {}

    @classmethod
    def by_model(cls, cells: Sequence[Cell]) -> CellAnalyses:
        """A panel per model, a row per method; seeds of one row are averaged."""
        placed = [
            PlacedCell(cell.model, cell.method, cell) for cell in cells if method_kind(cell.method) != "first-stage"
        ]
        first = [cell for cell in cells if method_kind(cell.method) == "first-stage"]
        return cls(placed, first, {one.row: method_name(one.row) for one in placed})

    @classmethod
    def by_label(cls, panel: str, labelled: Mapping[str, Cell]) -> CellAnalyses:
        """One panel, a row per labelled cell: seeds stay apart."""
        rerankers = {label: cell for label, cell in labelled.items() if method_kind(cell.method) != "first-stage"}
        placed = [PlacedCell(panel, label, cell) for label, cell in rerankers.items()]
        first = [cell for label, cell in labelled.items() if label not in rerankers]
        return cls(placed, first, {label: label for label in rerankers})

    def scores(self, cell: Cell) -> list[QueryScores]:
        """The lists of a cell, read once."""
        if str(cell.path) not in self._scores:
            self._scores[str(cell.path)] = cell.scores()
        return self._scores[str(cell.path)]

    def deviations(self) -> Panels:
        """Normalised middle-zone deviation of the methods whose scores mean something (a generated order has none)."""
        return self._panels(
            lambda cell: mean_middle_zone_std(self.scores(cell)) if method_kind(cell.method) == "attention" else None
        )

    def promotions(self) -> dict[str, dict[str, Rates]]:
        """panel -> row -> (relevant rate, irrelevant rate, gap), every benchmark counting once."""
        found: dict[tuple[str, str], dict[str, list[Promotion]]] = {}
        for one in self.placed:
            if rows := self.scores(one.cell):
                found.setdefault((one.panel, one.row), {}).setdefault(one.cell.benchmark, []).append(promotion(rows))
        panels: dict[str, dict[str, Rates]] = {}
        for (panel, row), benchmarks in found.items():
            rates = mean_rates(benchmarks.values())
            if rates is not None:
                panels.setdefault(panel, {})[row] = rates
        return panels

    def curves(self) -> dict[tuple[str, str], dict[str, PositionCurve]]:
        """(panel, its first benchmark) -> row -> score by position, of the first seed; other benchmarks would repeat
        the picture.
        """
        found: dict[tuple[str, str], dict[str, PositionCurve]] = {}
        chosen: dict[str, str] = {}
        for one in self.placed:
            benchmark = chosen.setdefault(one.panel, one.cell.benchmark)
            curves = found.setdefault((one.panel, benchmark), {})
            if one.cell.benchmark != benchmark or method_kind(one.cell.method) != "attention" or one.row in curves:
                continue
            curve = score_by_position(self.scores(one.cell))
            if curve is not None:
                curves[one.row] = curve
        return {key: curves for key, curves in found.items() if curves}

    def costs(self, measure: str) -> tuple[list[CostPoint], dict[str, float]]:
        """The rerankers' mean seconds per query and mean measure by model and method, and the first stage's mean
        measure by method.

        Only over the benchmarks that *every* reranker has, so that no row gains by absence, each counting once however
        many seeds it has. The first stage has no point of its own: nobody timed it here.
        """
        rows: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
        for one in self.placed:
            value, seconds = one.cell.value(measure), one.cell.metrics.get("seconds_per_query")
            if value is not None and seconds:
                row = rows.setdefault((one.cell.model, one.cell.method), {})
                row.setdefault(one.cell.benchmark, []).append((float(seconds), value))
        shared = set.intersection(*(set(found) for found in rows.values())) if rows else set()
        points = []
        for (model, method), found in rows.items() if shared else ():
            per_query = mean(mean(pair[0] for pair in found[name]) for name in sorted(shared))
            points.append(
                CostPoint(
                    per_query, mean(mean(pair[1] for pair in found[name]) for name in sorted(shared)), model, method
                )
            )
        first: dict[str, dict[str, float]] = {}
        for cell in self.first_stage:
            value = cell.value(measure)
            if value is not None and cell.benchmark in shared:
                first.setdefault(cell.method, {})[cell.benchmark] = value
        levels = {method: mean(found.values()) for method, found in first.items() if set(found) == shared}
        return sorted(points, key=lambda point: (point.model, method_order(point.method))), levels

    def _panels(self, value_of: Callable[[Cell], float | None]) -> Panels:
        """Average over seeds, leaving out what cannot be computed."""
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for one in self.placed:
            value = value_of(one.cell)
            if value is not None:
                found.setdefault(one.panel, {}).setdefault(one.row, {}).setdefault(one.cell.benchmark, []).append(value)
        return {
            panel: {
                row: {name: mean(values) for name, values in benchmarks.items()} for row, benchmarks in rows.items()
            }
            for panel, rows in found.items()
        }
