"""`headrank report --matrix`: the paper's tables and figures from a directory of cells; the same directory gives the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrank.evaluation.pooled_tests import paired_test_grids
from headrank.experiments.cells import Cell, conditions
from headrank.formats import atomic_write
from headrank.methods import method_name
from headrank.reports.cell_analyses import CellAnalyses, comparable_cells
from headrank.reports.page import Block, Page, Paragraph, Picture
from headrank.reports.paper_tables import TableSpec, build_table, overview_table, parameters_in_name
from headrank.reports.table_text import to_csv, to_latex, to_markdown
from headrank.reports.tables import Table


def write_matrix_report(cells: Sequence[Cell], output: Path, specs: Sequence[TableSpec], *, with_published: bool = True) -> list[Path]:
    """Write tables/ (md, tex, csv), figures/ (png, pdf), report.md and report.html; returns what was written, pages last.

    Every depth and document order is a set of tables of its own: numbers under different conditions never share a table.
    """
    page, written = Page("HeadRank: tables and analyses"), []
    for condition in conditions(cells):
        chosen = comparable_cells(cells, condition)
        if not chosen:
            continue
        name = _condition_name(condition)
        tables = _tables(chosen, specs, name, condition, with_published)
        for table in tables:
            written += write_table(table, output / "tables")
        page.add(f"Tables, {name}", list(tables))
        page.add(f"Tests, {name}", list(paired_test_grids(chosen)))
        page.add(f"Analyses, {name}", _analysis_blocks(CellAnalyses(chosen), output / "figures", name))
    if not page.sections:
        page.add("Nothing to compare", [Paragraph("Only first-stage runs were found; run at least one reranking method.")])
    return [*written, *page.write(output)]


def write_table(table: Table, folder: Path) -> list[Path]:
    """NAME.md, NAME.tex and NAME.csv."""
    paths = []
    for ending, text in (("md", to_markdown(table)), ("tex", to_latex(table)), ("csv", to_csv(table))):
        path = folder / f"{table.name}.{ending}"
        with atomic_write(path) as stream:
            stream.write(text)
        paths.append(path)
    return paths


def _condition_name(condition: tuple[int, str]) -> str:
    depth, order = condition
    return (f"top {depth}" if depth else "any depth") + ("" if order == "retriever" else f", {order}")


def _tables(cells: Sequence[Cell], specs: Sequence[TableSpec], name: str, condition: tuple[int, str], with_published: bool) -> list[Table]:
    """The overview of what we ran, then each of the paper's tables of which we have at least one number."""
    suffix = "_" + re.sub(r"\W+", "_", name)
    tables = [overview_table(cells, f"Our runs, {name}", f"overview{suffix}")]
    for spec in specs:
        ours = {(cell.benchmark, measure) for cell in cells for measure in cell.metrics["measures"]}
        is_there = any(column.key in ours for column in spec.columns)
        has_rows = spec.methods is None or any(cell.method in spec.methods and "+" in cell.method for cell in cells)
        if is_there and has_rows:
            table = build_table(spec, cells, depth=condition[0], with_published=with_published and condition[1] == "retriever")
            tables.append(replace(table, name=table.name + suffix, title=f"{table.title} ({name})"))
    return tables


def _analysis_blocks(analyses: CellAnalyses, figures: Path, name: str) -> list[Block]:
    """The paper's figures, each only where the cells have what it needs."""
    from headrank.reports import figures as draw

    stem = figures / re.sub(r"\W+", "_", name)
    blocks: list[Block] = []
    deviations = analyses.deviations()
    if deviations:
        png, _ = draw.draw_std_heatmap(deviations, stem.parent / f"{stem.name}_middle_std")
        blocks.append(
            Picture(
                png,
                f"Middle-zone deviations: {_told(deviations)}.",
                "Normalised middle-zone standard deviation; lighter is more homogenised.",
            )
        )
        benchmarks = {benchmark for panel in deviations.values() for row in panel.values() for benchmark in row}
        if len(benchmarks) >= 3:
            png, _ = draw.draw_std_radar(deviations, stem.parent / f"{stem.name}_radar")
            blocks.append(
                Picture(
                    png, "The same deviations as radar profiles.", "Per-dataset profiles; the outermost polygon is the least homogenised."
                )
            )
        sizes = {model: size for model in deviations if (size := parameters_in_name(model)) is not None}
        if len(sizes) >= 2:
            png, _ = draw.draw_std_scaling(deviations, sizes, stem.parent / f"{stem.name}_scaling")
            blocks.append(
                Picture(png, "Deviation against model size.", "Scaling of the middle-zone deviation with the number of parameters.")
            )
    promotions = analyses.promotions()
    if promotions:
        png, _ = draw.draw_promotion(promotions, stem.parent / f"{stem.name}_promotion")
        told = "; ".join(
            f"{model} {method_name(row)} gap {100 * rates[2]:+.1f}" for model, panel in promotions.items() for row, rates in panel.items()
        )
        blocks.append(
            Picture(
                png,
                f"Promotion: {told}.",
                "Middle-to-front promotion averaged over benchmarks; the number is the selectivity gap in points.",
            )
        )
    blocks += _curve_blocks(analyses, stem)
    measures = list(dict.fromkeys(next(iter(cell.metrics["measures"])) for cell in analyses.cells))
    for measure in measures[:1]:
        points, levels = analyses.costs(measure)
        if len(points) > 1:
            png, _ = draw.draw_pareto(points, measure, stem.parent / f"{stem.name}_pareto", levels)
            blocks.append(
                Picture(
                    png,
                    "Latency against effectiveness with the Pareto frontier.",
                    f"Latency against {measure}, averaged over the benchmarks every row has.",
                )
            )
    return blocks


def _curve_blocks(analyses: CellAnalyses, stem: Path) -> list[Block]:
    """Score by position for each model on its first benchmark; the rest would repeat the picture."""
    from headrank.reports.figures import draw_position_curves

    blocks: list[Block] = []
    for model in dict.fromkeys(cell.model for cell in analyses.cells):
        benchmark = next(cell.benchmark for cell in analyses.cells if cell.model == model)
        curves = analyses.curves(model, benchmark)
        if curves:
            slug = re.sub(r"\W+", "_", f"{model}_{benchmark}").strip("_")
            png, _ = draw_position_curves(curves, stem.parent / f"{stem.name}_positions_{slug}")
            blocks.append(
                Picture(
                    png,
                    f"Score by position, {model} on {benchmark}.",
                    f"Score by position, {model} on {benchmark}: flat and equal lines are homogenisation.",
                )
            )
    return blocks


def _told(panels: dict[str, dict[str, dict[str, float]]]) -> str:
    return "; ".join(
        f"{model} {method_name(method)} {sum(row.values()) / len(row):.3f} on average"
        for model, panel in panels.items()
        for method, row in panel.items()
    )
