"""What happens inside the lists: promotion out of the middle zone, and score by position."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from headrank.evaluation.homogenisation import PositionCurve, middle_zone
from headrank.methods import method_name, method_order
from headrank.reports.figures.style import (
    GRID,
    INK,
    MUTED,
    WIDTH,
    method_style,
    new_figure,
    save_figure,
    styled,
    subtitle,
    title_width,
)

Rates = tuple[float, float, float]  # relevant rate, irrelevant rate, gap


def draw_promotion(
    panels: Mapping[str, Mapping[str, Rates]],
    path: str | os.PathLike[str],
    note: str = "",
    methods: Mapping[str, str] | None = None,
) -> list[Path]:
    """A panel per model: for every method the promotion rate of relevant (filled) and irrelevant (hatched) middle-zone
    documents, with the selectivity gap in percentage points above. ``methods`` gives the method of each row where rows
    are known by label.
    """
    rows = _rows((row for panel in panels.values() for row in panel), methods)
    with styled():
        widest = max(0.4 + 0.72 * len(rows), *map(title_width, panels))
        figure = new_figure(max(WIDTH * 0.75, 0.9 + len(panels) * widest), 3.6)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (model, panel) in zip(grid, panels.items(), strict=True):
            for place, (row, (method, _)) in enumerate(rows.items()):
                if row not in panel:
                    continue
                relevant, irrelevant, gap = (100 * value for value in panel[row])
                colour = method_style(method).colour
                axes.bar(place - 0.2, relevant, 0.38, color=colour, edgecolor=INK, linewidth=0.5)
                axes.bar(place + 0.2, irrelevant, 0.38, color="white", edgecolor=colour, hatch="////", linewidth=1.0)
                axes.text(
                    place,
                    max(relevant, irrelevant) + 1,
                    f"{gap:+.1f}",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                    fontweight="bold",
                )
            axes.set_xticks(
                range(len(rows)), [name for _, name in rows.values()], rotation=25, ha="right", rotation_mode="anchor"
            )
            axes.set_xlim(-0.6, len(rows) - 0.4)
            axes.margins(y=0.14)
            axes.grid(axis="y")
            axes.tick_params(axis="x", length=0)
            subtitle(axes, model, note)
        grid[0].set_ylabel("promoted to the top quartile (%)")
        keys = [
            Patch(facecolor=MUTED, edgecolor=INK, linewidth=0.5),
            Patch(facecolor="white", edgecolor=MUTED, hatch="////"),
        ]
        figure.legend(
            keys, ["relevant (higher is better)", "irrelevant (lower is better)"], loc="outside lower center", ncols=2
        )
        return save_figure(figure, path)


def draw_position_curves(
    curves: Mapping[str, PositionCurve],
    path: str | os.PathLike[str],
    note: str = "",
    methods: Mapping[str, str] | None = None,
) -> list[Path]:
    """A small chart a method: mean normalised score at each place of the prompt, relevant and irrelevant documents
    apart. ``methods`` gives the method of each row where rows are known by label.

    The shaded band is the middle half of the prompt: the middle zone, where the prompt follows the retriever. Lines
    that lie on each other there are homogenisation.
    """
    rows = _rows(curves, methods)
    columns = min(3, max(len(rows), 1))
    lines = -(-len(rows) // columns)
    with styled():
        figure = new_figure(max(WIDTH * 0.85, 2.5 * columns), 1.0 + 2.1 * lines)  # the legend needs that width
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        for place, (axes, (row, (method, name))) in enumerate(zip(grid.flat, rows.items(), strict=False)):
            axes.tick_params(labelbottom=place + columns >= len(rows))  # also where the line below is not full
            curve, style = curves[row], method_style(method)
            zone = curve.positions[middle_zone(curve.positions.tolist())]
            if len(zone):
                axes.axvspan(zone[0] - 0.5, zone[-1] + 0.5, color=GRID, alpha=0.45, linewidth=0)
            axes.plot(curve.positions, _smooth(curve.irrelevant), color=MUTED, linestyle="--", linewidth=1.3)
            axes.plot(curve.positions, _smooth(curve.relevant), color=style.colour)
            if not np.isfinite(curve.relevant).any():
                axes.plot(curve.positions, _smooth(curve.mean), color=style.colour)
            axes.scatter(
                curve.positions, curve.relevant, s=5, color=style.colour, alpha=0.5, linewidth=0, clip_on=False
            )
            axes.set_ylim(0, 1)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(axis="y")
            axes.set_title(name, fontsize=9.5)
        for axes in list(grid.flat)[len(rows) :]:
            axes.set_visible(False)
        figure.supxlabel(f"place in the prompt{note}", fontsize=9)
        figure.supylabel("score, min-max per list", fontsize=9)
        keys = [
            Line2D([], [], color=INK),
            Line2D([], [], color=MUTED, linestyle="--", linewidth=1.3),
            Patch(color=GRID, alpha=0.45),
        ]
        figure.legend(
            keys,
            ["relevant (or all, where nothing is judged)", "irrelevant", "middle of the prompt"],
            loc="outside upper center",
            ncols=3,
        )
        return save_figure(figure, path)


def _rows(names: Iterable[str], methods: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Row -> (method, name for people) in the paper's order of methods; without ``methods`` the rows are methods
    themselves.

    A label's model stands on a line of its own, or long names would touch their neighbours.
    """
    found = {row: (methods[row], row.replace(", ", "\n", 1)) if methods else (row, method_name(row)) for row in names}
    return dict(sorted(found.items(), key=lambda item: method_order(item[1][0])))


def _smooth(values: np.ndarray, width: int = 3) -> np.ndarray:
    """A centred moving average that skips NaN and leaves them where nothing is near."""
    padded = np.pad(values, width // 2, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    counts = np.isfinite(windows).sum(axis=1)
    sums = np.nansum(windows, axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
