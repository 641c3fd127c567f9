"""The analyses of a set of cells under one condition: deviations, promotion, curves and costs by model and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from headrank.evaluation.homogenisation import PositionCurve, mean_middle_zone_std, score_by_position
from headrank.evaluation.promotion import Promotion, mean_rates, promotion
from headrank.evaluation.scored_lists import QueryScores
from headrank.experiments.cells import Cell
from headrank.methods import method_kind, method_order
from headrank.reports.pareto import CostPoint

Panels = dict[str, dict[str, dict[str, float]]]  # model -> method -> benchmark -> value


def comparable_cells(cells: Sequence[Cell], condition: tuple[int, str]) -> list[Cell]:
    """The cells of one (depth, order), with the first-stage run of each of their benchmarks, which no prompt order changes.

    Empty when the condition holds nothing but first-stage runs that another condition of the same depth shows anyway.
    """
    rerankers = [cell for cell in cells if cell.condition == condition and method_kind(cell.method) != "first-stage"]
    wanted = {cell.benchmark for cell in rerankers}
    first: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        if method_kind(cell.method) == "first-stage" and cell.benchmark in wanted:
            key = (cell.benchmark, cell.method)
            if key not in first or cell.condition[0] == condition[0] != first[key].condition[0]:
                first[key] = cell
    return [cell for cell in cells if cell in rerankers or cell in first.values()]


class CellAnalyses:
    """Reads each cell's scores once and answers the paper's questions about them."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        """All cells must share depth and order; first-stage cells have no scores worth analysing and are left out."""
        self.cells = [cell for cell in cells if method_kind(cell.method) != "first-stage"]
        self.first_stage = [cell for cell in cells if method_kind(cell.method) == "first-stage"]
        self._scores: dict[str, list[QueryScores]] = {}

    def scores(self, cell: Cell) -> list[QueryScores]:
        """The lists of a cell, read once."""
        if str(cell.path) not in self._scores:
            self._scores[str(cell.path)] = cell.scores()
        return self._scores[str(cell.path)]

    def deviations(self) -> Panels:
        """Normalised middle-zone deviation of the methods whose scores mean something (a generated order has none)."""
        return self._panels(lambda cell: mean_middle_zone_std(self.scores(cell)) if method_kind(cell.method) == "attention" else None)

    def promotions(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """model -> method -> (relevant rate, irrelevant rate, gap), every benchmark counting once."""
        found: dict[tuple[str, str], dict[str, list[Promotion]]] = {}
        for cell in self.cells:
            found.setdefault((cell.model, cell.method), {}).setdefault(cell.benchmark, []).append(promotion(self.scores(cell)))
        panels: dict[str, dict[str, tuple[float, float, float]]] = {}
        for (model, method), benchmarks in found.items():
            rates = mean_rates(benchmarks.values())
            if rates is not None:
                panels.setdefault(model, {})[method] = rates
        return panels

    def curves(self, model: str, benchmark: str) -> dict[str, PositionCurve]:
        """method -> score by position of one model on one benchmark (the first seed of each)."""
        curves: dict[str, PositionCurve] = {}
        for cell in self.cells:
            if (cell.model, cell.benchmark) == (model, benchmark) and method_kind(cell.method) == "attention" and cell.method not in curves:
                curve = score_by_position(self.scores(cell))
                if curve is not None:
                    curves[cell.method] = curve
        return curves

    def costs(self, measure: str) -> tuple[list[CostPoint], dict[str, float]]:
        """The rerankers' mean seconds a query and mean measure, and the first stage's mean measure by method.

        Only over the benchmarks that *every* reranker has, so that no row gains by absence, each counting once however many seeds
        it has. The first stage has no point of its own: nobody timed it here.
        """
        rows: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
        for cell in self.cells:
            value, seconds = cell.value(measure), cell.metrics.get("seconds_per_query")
            if value is not None and seconds:
                rows.setdefault((cell.model, cell.method), {}).setdefault(cell.benchmark, []).append((float(seconds), value))
        shared = set.intersection(*(set(found) for found in rows.values())) if rows else set()
        points = []
        for (model, method), found in rows.items() if shared else ():
            seconds_a_query = mean(mean(pair[0] for pair in found[name]) for name in sorted(shared))
            points.append(CostPoint(seconds_a_query, mean(mean(pair[1] for pair in found[name]) for name in sorted(shared)), model, method))
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
        for cell in self.cells:
            value = value_of(cell)
            if value is not None:
                found.setdefault(cell.model, {}).setdefault(cell.method, {}).setdefault(cell.benchmark, []).append(value)
        return {
            model: {method: {name: mean(values) for name, values in row.items()} for method, row in methods.items()}
            for model, methods in found.items()
        }
