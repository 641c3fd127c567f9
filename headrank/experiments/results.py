"""The tables of a study: its cells that are there, benchmark by benchmark, in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

from headrank.experiments.cells import METRICS, read_cell
from headrank.experiments.plan_cells import PlannedCell, cells_folder
from headrank.experiments.plan_study import StudyPlan
from headrank.formats import Collection
from headrank.reports.grids import Grid
from headrank.reports.study_table import TableRow, best_possible, study_grid


def result_grids(planned: StudyPlan) -> list[Grid]:
    """One table per benchmark, depth and order; a first stage stands in all orders of its depth."""
    folder = cells_folder(planned.plan)
    there = [each for each in planned.cells if (folder / each.cell.folder / METRICS).is_file()]
    conditions = dict.fromkeys((each.cell.benchmark, each.cell.depth, each.cell.order) for each in there)
    grids = []
    for benchmark, depth, order in conditions:
        wanted = [each for each in there if each.cell.benchmark == benchmark and each.cell.depth == depth]
        shown = [each for each in wanted if each.cell.model is None or each.cell.order == order]
        if order != "retriever" and all(each.cell.model is None for each in shown):
            continue
        rows = [
            TableRow(title, tuple(read_cell(folder / each.cell.folder) for each in cells))
            for title, cells in _by_row(shown).items()
        ]
        measure = benchmark.measures[0]
        queries = set(rows[0].cells[0].per_query(measure))
        opened = Collection.open(benchmark.collection)
        run = {query_id: listed for query_id, listed in opened.run().items() if query_id in queries}
        ceiling = best_possible(run, opened.qrels(), depth, measure)
        note = (
            f"{len(queries)} queries; the best order of the same {depth} candidates per query would have "
            f"{100 * ceiling:.1f}"
        )
        caption = f"{benchmark.name}: top {depth} in {order} order"
        grids.append(Grid(**{**vars(study_grid(caption, rows, measure)), "notes": (note,)}))
    return grids


def _by_row(cells: Sequence[PlannedCell]) -> dict[str, list[PlannedCell]]:
    """The seeds of a row together; rows and runs of other titles apart."""
    rows: dict[str, list[PlannedCell]] = {}
    for each in cells:
        is_run = each.cell.model is not None and each.cell.model.seed is None and each.row.title
        variant = each.cell.method.removeprefix(each.cell.base_method).removeprefix("+")
        is_labelled = is_run and variant and variant != (each.row.variant or "")
        rows.setdefault(f"{each.title} ({variant})" if is_labelled else each.title, []).append(each)
    return rows
