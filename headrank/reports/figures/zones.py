"""Middle-zone normalised standard deviation: heat map, radar and scaling trend (the paper's homogenisation figures)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrank.methods import method_name, method_order
from headrank.reports.figures.style import (
    MUTED,
    SEQUENTIAL,
    WIDTH,
    method_style,
    new_figure,
    readable_on,
    save_figure,
    styled,
    title_width,
)

Deviations = Mapping[str, Mapping[str, float]]  # method -> benchmark -> mean normalised middle-zone deviation


def _axes_of(panels: Mapping[str, Deviations]) -> tuple[list[str], list[str]]:
    """Methods in the paper's order and benchmarks in the order of first appearance."""
    methods = sorted({method for panel in panels.values() for method in panel}, key=method_order)
    benchmarks = list(dict.fromkeys(name for panel in panels.values() for row in panel.values() for name in row))
    return methods, benchmarks


def _highest(panels: Mapping[str, Deviations]) -> float:
    """The largest deviation of all panels, so that they share one scale; 1 when there is none."""
    return (
        max((value for panel in panels.values() for row in panel.values() for value in row.values()), default=0.0)
        or 1.0
    )


def draw_std_heatmap(panels: Mapping[str, Deviations], path: str | os.PathLike[str]) -> list[Path]:
    """A panel per model, a row per method, a column per benchmark; lighter is flatter (worse). Cells not run stay
    hatched.
    """
    methods, benchmarks = _axes_of(panels)
    highest = _highest(panels)
    with styled():
        figure = new_figure(
            1.6 + len(panels) * max(0.4 + 0.5 * len(benchmarks), *map(title_width, panels)), 1.7 + 0.36 * len(methods)
        )
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (model, panel) in zip(grid, panels.items(), strict=True):
            values = np.array([[panel.get(method, {}).get(name, np.nan) for name in benchmarks] for method in methods])
            axes.set_facecolor("#F4F4F7")
            shown = axes.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=highest, aspect="auto")
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    fill = SEQUENTIAL(value / highest)
                    axes.text(
                        column,
                        row,
                        f"{value:.3f}".removeprefix("0"),
                        ha="center",
                        va="center",
                        fontsize=7.5,
                        color=readable_on(fill),
                    )
            axes.set_xticks(range(len(benchmarks)), benchmarks, rotation=35, ha="right", rotation_mode="anchor")
            axes.set_yticks(range(len(methods)), [method_name(method) for method in methods])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_title(model)
        bar = figure.colorbar(shown, ax=list(grid), pad=0.02, shrink=0.9)
        bar.set_label("middle-zone std (higher is better)")
        bar.outline.set_visible(False)
        return save_figure(figure, path)


def draw_std_radar(panels: Mapping[str, Deviations], path: str | os.PathLike[str]) -> list[Path]:
    """A radar a model with one spoke a benchmark and one polygon a method; the outermost polygon is the least
    homogenised.

    Needs three benchmarks at least (a polygon with two corners is a line); methods lacking one are left out of that
    panel.
    """
    methods, benchmarks = _axes_of(panels)
    highest = _highest(panels)
    angles = np.linspace(0, 2 * np.pi, len(benchmarks), endpoint=False)
    closed = np.append(angles, angles[:1])
    with styled():
        figure = new_figure(max(WIDTH * 0.75, 3.3 * len(panels)), 3.9)
        grid = figure.subplots(1, len(panels), squeeze=False, subplot_kw={"projection": "polar"})[0]
        for axes, (model, panel) in zip(grid, panels.items(), strict=True):
            for method in methods:
                row = panel.get(method, {})
                if not all(name in row for name in benchmarks):
                    continue
                values = [row[name] for name in [*benchmarks, benchmarks[0]]]
                style = method_style(method)
                axes.plot(
                    closed,
                    values,
                    color=style.colour,
                    linestyle=style.line,
                    marker=style.marker,
                    markersize=4,
                    label=method_name(method),
                )
                if method.startswith("headrank"):
                    axes.fill(closed, values, color=style.colour, alpha=0.12, linewidth=0)
            axes.set_xticks(angles, benchmarks)
            axes.tick_params(axis="y", labelsize=7, labelcolor=MUTED)
            axes.set_rlabel_position(90 / max(len(benchmarks), 1))
            axes.set_ylim(0, 1.05 * highest)
            axes.spines["polar"].set_visible(False)
            axes.set_title(model, loc="center", pad=14)
        handles, labels = _all_handles(list(grid))
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(len(labels), 1)))
        return save_figure(figure, path)


def draw_std_scaling(
    panels: Mapping[str, Deviations], sizes: Mapping[str, float], path: str | os.PathLike[str]
) -> list[Path]:
    """A small chart per benchmark: middle-zone deviation against the model's parameters (log axis), one line a
    method.
    """
    methods, benchmarks = _axes_of(panels)
    models = sorted((model for model in panels if model in sizes), key=lambda model: sizes[model])
    columns = min(4, max(len(benchmarks), 1))
    rows = -(-len(benchmarks) // columns)
    with styled():
        figure = new_figure(max(WIDTH * 0.6, 1.95 * columns), 0.8 + 1.9 * rows)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True)
        for place, (axes, name) in enumerate(zip(grid.flat, benchmarks, strict=False)):
            axes.tick_params(labelbottom=place + columns >= len(benchmarks))  # also where the row below is not full
            for method in methods:
                points = [
                    (sizes[model], panels[model][method][name])
                    for model in models
                    if name in panels[model].get(method, {})
                ]
                if points:
                    style = method_style(method)
                    axes.plot(
                        *zip(*points, strict=True),
                        color=style.colour,
                        linestyle=style.line,
                        marker=style.marker,
                        label=method_name(method),
                    )
            axes.set_xscale("log")
            axes.set_xticks([sizes[model] for model in models], [short_count(sizes[model]) for model in models])
            axes.minorticks_off()
            axes.grid(axis="y")
            axes.set_title(name, fontsize=9.5)
        for axes in list(grid.flat)[len(benchmarks) :]:
            axes.set_visible(False)
        figure.supxlabel("parameters", fontsize=9)
        figure.supylabel("middle-zone std", fontsize=9)
        handles, labels = _all_handles(list(grid.flat))
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=min(int(figure.get_figwidth() / 1.4), max(len(labels), 1)),
        )
        return save_figure(figure, path)


def _all_handles(axes: Sequence) -> tuple[list, list[str]]:
    """Each label once, over all panels: a method may be missing from the first."""
    found: dict[str, object] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def short_count(number: float) -> str:
    """135e6 -> '135M', 0.6e9 -> '0.6B', 1.7e9 -> '1.7B'."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit / 2:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:g}"
