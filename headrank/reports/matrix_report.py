"""`headrank report --matrix`: the paper's tables and figures from a directory of cells; the same directory gives the
same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrank.evaluation.published import FIGURE_BENCHMARKS, SELECTIVITY_GAP
from headrank.experiments.cells import Cell
from headrank.formats import atomic_write
from headrank.methods import method_kind
from headrank.reports.analyses import CellAnalyses
from headrank.reports.conditions import CellGroup, group_cells
from headrank.reports.page import Block, Page, Paragraph
from headrank.reports.paper_tables import TableSpec, build_table, overview_table
from headrank.reports.row_tests import paired_test_grids, pooled_test_grid
from headrank.reports.sections import list_blocks, pareto_blocks
from headrank.reports.table_text import to_csv, to_latex, to_markdown
from headrank.reports.tables import Table


def write_matrix_report(
    cells: Sequence[Cell],
    output: Path,
    specs: Sequence[TableSpec],
    *,
    own_depths: Mapping[str, int] | None = None,
    with_published: bool = True,
    pool: str | None = None,
) -> list[Path]:
    """Write tables/ (md, tex, csv), figures/ (png, pdf), report.md and report.html; returns what was written, pages
    last.

    Every group of conditions.py is a set of tables of its own: numbers under different conditions never share a table,
    but for benchmarks that each stand at the depth ``own_depths`` gives them, as in the paper. ``pool`` adds tests over
    the queries of all benchmarks together, of every row against that method ('' for the usual opponents).
    """
    page, written = Page("HeadRank: tables and analyses"), []
    for group in group_cells(cells, own_depths or {}):
        is_papers = with_published and group.order == "retriever"
        tables = _tables(group, specs, is_papers)
        for table in tables:
            written += write_table(table, output / "tables")
        papers_eight = _papers_figures(group)
        if papers_eight:
            name, stem = "the paper's eight datasets", output / "figures" / f"{group.key}_eight"
            published = SELECTIVITY_GAP if is_papers else ()
            page.add(
                f"The paper's figures, {name}", list_blocks(CellAnalyses.by_model(papers_eight), stem, name, published)
            )
        analyses, stem = CellAnalyses.by_model(group.cells), output / "figures" / group.key
        # the paper's promotion figures are averages over its eight datasets
        blocks: list[Block] = list_blocks(
            analyses, stem, group.name, SELECTIVITY_GAP if is_papers and not papers_eight else ()
        )
        measure = next(iter(analyses.placed[0].cell.metrics["measures"]))
        page.add(f"Tables, {group.name}", [table.grid() for table in tables])
        together = pooled_test_grid(group.cells, pool or None) if pool is not None else None
        page.add(
            f"Tests, {group.name}", [*([together] if together is not None else []), *paired_test_grids(group.cells)]
        )
        page.add(f"Analyses, {group.name}", [*blocks, *pareto_blocks(analyses, measure, stem, group.name)])
    if not page.sections:
        page.add(
            "Nothing to compare", [Paragraph("Only first-stage runs were found; run at least one reranking method.")]
        )
    return [*written, *page.write(output)]


def _papers_figures(group: CellGroup) -> list[Cell]:
    """The cells behind the paper's heat maps, radars and promotion figures: its eight datasets and its methods without
    variants.

    None where one of the eight is missing: an average over what happens to be there would be another number.
    """
    cells = [cell for cell in group.cells if cell.benchmark in FIGURE_BENCHMARKS and "+" not in cell.method]
    return (
        cells
        if {cell.benchmark for cell in cells if method_kind(cell.method) == "attention"} == set(FIGURE_BENCHMARKS)
        else []
    )


def write_table(table: Table, folder: Path) -> list[Path]:
    """NAME.md, NAME.tex and NAME.csv."""
    paths = []
    texts = {"md": to_markdown(table.grid()), "tex": to_latex(table.grid()), "csv": to_csv(table.data_grid())}
    for ending, text in texts.items():
        path = folder / f"{table.name}.{ending}"
        with atomic_write(path) as stream:
            stream.write(text)
        paths.append(path)
    return paths


def _tables(group: CellGroup, specs: Sequence[TableSpec], with_published: bool) -> list[Table]:
    """The overview of what we ran, then each of the paper's tables of which we have at least one number."""
    suffix = f"_{group.key}"
    tables = [overview_table(group.cells, f"Our runs, {group.name}", f"overview{suffix}")]
    for spec in specs:
        ours = {(cell.benchmark, measure) for cell in group.cells for measure in cell.metrics["measures"]}
        is_there = any(column.key in ours for column in spec.columns)
        has_rows = spec.methods is None or any(
            cell.method in spec.methods and "+" in cell.method for cell in group.cells
        )
        if is_there and has_rows:
            table = build_table(spec, group.cells, with_published=with_published)
            tables.append(replace(table, name=table.name + suffix, title=f"{table.title} ({group.name})"))
    return tables
