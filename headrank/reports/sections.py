"""The one section builder: blocks of figures and tables about a set of cells, for the page of a run and for that of
a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from statistics import mean

from headrank.evaluation.published import PROMOTED_AT_4B, SELECTIVITY_GAP
from headrank.reports.analyses import CellAnalyses, Panels, Rates
from headrank.reports.grids import Grid, GridRow
from headrank.reports.page import Block, Picture
from headrank.reports.paper_tables import parameters_in_name


def list_blocks(analyses: CellAnalyses, stem: Path, condition: str, published: Collection[str] = ()) -> list[Block]:
    """What happened inside the lists: middle-zone deviation, promotion, score by position; each only where cells kept
    their scores.

    Figures are written beside ``stem``. ``published`` names the models whose promotion figures of the paper stand
    beside ours.
    """
    return [
        *_deviation_blocks(analyses, stem, condition),
        *_promotion_blocks(analyses, stem, condition, published),
        *_curve_blocks(analyses, stem),
    ]


def pareto_blocks(analyses: CellAnalyses, measure: str, stem: Path, condition: str) -> list[Block]:
    """Latency against effectiveness; none for fewer than two timed rows."""
    from headrank.reports.figures import draw_pareto

    points, levels = analyses.costs(measure)
    if len(points) < 2:
        return []
    png, _ = draw_pareto(points, measure, beside(stem, "pareto"), levels)
    caption = f"Latency against {measure}, {condition}, averaged over the benchmarks that every row has."
    return [Picture(png, "Latency against effectiveness with the Pareto frontier.", caption)]


def beside(stem: Path, what: str) -> Path:
    """The path of a figure of this section, without its ending."""
    return stem.parent / f"{stem.name}_{what}"


def slug(text: str) -> str:
    """Part of a file name."""
    return re.sub(r"\W+", "_", text).strip("_")


def _deviation_blocks(analyses: CellAnalyses, stem: Path, condition: str) -> list[Block]:
    from headrank.reports import figures as draw

    deviations = analyses.deviations()
    if not deviations:
        return []
    blocks: list[Block] = [_deviation_grid(analyses, deviations, condition)]
    benchmarks = {benchmark for panel in deviations.values() for row in panel.values() for benchmark in row}
    if len(benchmarks) >= 2:
        png, _ = draw.draw_std_heatmap(deviations, beside(stem, "middle_std"))
        caption = "Normalised middle-zone standard deviation; lighter is more homogenised."
        blocks.append(Picture(png, f"Middle-zone deviations: {_describe(analyses, deviations)}.", caption))
    if len(benchmarks) >= 3:
        png, _ = draw.draw_std_radar(deviations, beside(stem, "radar"))
        caption = "Profiles per benchmark; the outermost polygon is the least homogenised."
        blocks.append(Picture(png, "The same deviations as radar profiles.", caption))
    sizes = {model: size for model in deviations if (size := parameters_in_name(model)) is not None}
    if len(sizes) >= 2:
        png, _ = draw.draw_std_scaling(deviations, sizes, beside(stem, "scaling"))
        caption = "Scaling of the middle-zone deviation with the number of parameters."
        blocks.append(Picture(png, "Deviation against model size.", caption))
    return blocks


def _deviation_grid(analyses: CellAnalyses, deviations: Panels, condition: str) -> Grid:
    """Rows under their panels, a column per benchmark; the average is over the benchmarks of the table, each
    counting once.
    """
    benchmarks = list(dict.fromkeys(name for panel in deviations.values() for row in panel.values() for name in row))
    has_average = len(benchmarks) > 1
    rows = []
    for panel, found in deviations.items():
        for row, values in found.items():
            texts = [f"{values[name]:.3f}" if name in values else "" for name in benchmarks]
            average = [f"{mean(values.values()):.3f}" if len(values) == len(benchmarks) else ""] if has_average else []
            rows.append(GridRow((analyses.names[row], *texts, *average), panel))
    headers = ("Method", *(benchmarks if has_average else ["Std"]), *(["Average"] if has_average else []))
    caption = f"Homogenisation, {condition}: normalised middle-zone standard deviation (higher is better)"
    return Grid(caption, headers, tuple(rows), group_header="Model" if has_average else "")


def _promotion_blocks(analyses: CellAnalyses, stem: Path, condition: str, published: Collection[str]) -> list[Block]:
    from headrank.reports.figures import draw_promotion

    promotions = analyses.promotions()
    if not promotions:
        return []
    is_by_label = any(analyses.names[row] == row for row in analyses.methods)
    png, _ = draw_promotion(promotions, beside(stem, "promotion"), methods=analyses.methods if is_by_label else None)
    told = "; ".join(
        f"{panel} {analyses.names[row]} gap {100 * rates[2]:+.1f}"
        for panel, rows in promotions.items()
        for row, rates in rows.items()
    )
    caption = (
        "Middle-zone documents that reached the top quartile, every benchmark counting once; the number is the "
        "selectivity gap."
    )
    return [
        _promotion_grid(analyses, promotions, condition, published),
        Picture(png, f"Promotion rates: {told}.", caption),
    ]


def _promotion_grid(
    analyses: CellAnalyses, promotions: dict[str, dict[str, Rates]], condition: str, published: Collection[str]
) -> Grid:
    """Ours, then the figures that the paper gives in its text."""
    rows = []
    for panel, found in promotions.items():
        for row, rates in found.items():
            rows.append(
                GridRow(
                    (analyses.names[row], *(f"{100 * rate:.1f}" for rate in rates[:2]), f"{100 * rates[2]:+.1f}"), panel
                )
            )
    for model, gap in SELECTIVITY_GAP.items():
        if model in published:
            known = PROMOTED_AT_4B if model == "Qwen3-4B" else {}
            rates_shown = (f"{known[kind]:.1f}" if kind in known else "" for kind in ("relevant", "irrelevant"))
            rows.append(
                GridRow(("HeadRank (paper, eight datasets)", *rates_shown, f"{gap:+.1f}"), model, is_quoted=True)
            )
    headers = ("Method", "Relevant (%)", "Irrelevant (%)", "Gap (points)")
    return Grid(f"Promotion from the middle zone, {condition}", headers, tuple(rows), group_header="Model")


def _curve_blocks(analyses: CellAnalyses, stem: Path) -> list[Block]:
    """A figure for each panel, on its first benchmark."""
    from headrank.reports.figures import draw_position_curves

    is_by_label = any(analyses.names[row] == row for row in analyses.methods)
    blocks: list[Block] = []
    for (panel, benchmark), curves in analyses.curves().items():
        name = panel if benchmark in panel else f"{panel} on {benchmark}"
        path = beside(stem, f"positions_{slug(name)}")
        png, _ = draw_position_curves(curves, path, methods=analyses.methods if is_by_label else None)
        caption = f"Score by position, {name}: where the relevant and the irrelevant line meet, scores are homogenised."
        blocks.append(Picture(png, f"Mean normalised score at each place of the prompt, {name}.", caption))
    return blocks


def _describe(analyses: CellAnalyses, panels: Panels) -> str:
    """The averages in words, for people who cannot see the picture."""
    return "; ".join(
        f"{panel} {analyses.names[row]} {mean(values.values()):.3f} on average"
        for panel, rows in panels.items()
        for row, values in rows.items()
    )
