"""A fitted readout: its weights on the head map, and what cross-validation said of depth and of key-value groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from headrank.method.heads import HeadSet
from headrank.reports.figures.style import GAIN, INK, LOSS, MUTED, new_figure, save_figure, styled, subtitle

SIGNED = LinearSegmentedColormap.from_list("headrank-signed", [LOSS, "#FBF9FD", GAIN])


def draw_readout(head_set: HeadSet, path: str | os.PathLike[str]) -> list[Path]:
    """Weights times deviations on the head map (left); nDCG@10 under cross-validation against layers and groups
    (right).

    Writes PATH.png and PATH.pdf. A readout whose file names one size only, or none, gets the map alone.
    """
    assert head_set.readout is not None
    sizes: Sequence[Mapping[str, Any]] = head_set.readout.fit.get("cross_validation") or []
    with styled():
        width = min(7.0, max(3.6, 1.6 + 0.34 * head_set.num_heads))
        figure = new_figure(width + (4.2 if len(sizes) > 1 else 0), 1.6 + 0.17 * head_set.num_layers)
        if len(sizes) > 1:
            grid = figure.add_gridspec(2, 2, width_ratios=[width, 4.2])
            axes = figure.add_subplot(grid[:, 0])
            _draw_sizes(figure.add_subplot(grid[0, 1]), sizes, "layers", "groups", "layers computed")
            _draw_sizes(figure.add_subplot(grid[1, 1]), sizes, "groups", "layers", "(layer, key-value group) pairs")
        else:
            axes = figure.subplots()
        _draw_map(figure, axes, head_set)
        return save_figure(figure, path)


def _draw_map(figure: Any, axes: Axes, head_set: HeadSet) -> None:
    values = np.full((head_set.num_layers, head_set.num_heads), np.nan)
    assert head_set.readout is not None
    for place, (layer, head) in enumerate(head_set.heads):
        row = head_set.table[place] if place < len(head_set.table) else {}
        values[layer, head] = row.get("importance", head_set.readout.weights[place])
    most = float(np.nanmax(np.abs(values))) or 1.0
    shown = axes.imshow(values, cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set_facecolor("#E6E6EC")
    if head_set.l_max + 1 < head_set.num_layers:
        axes.axhline(head_set.l_max + 0.5, color=INK, linestyle="--", linewidth=1.0)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, shrink=0.7, pad=0.03)
    bar.set_label("weight × deviation within a list")
    bar.outline.set_visible(False)
    used = (
        f"{head_set.l_max + 1} of {head_set.num_layers} layers, {head_set.prompt.document_layout} layout, grey: not "
        "read"
    )
    subtitle(axes, f"{len(head_set.heads)} weighted heads of {Path(head_set.model).name}", used)


def _draw_sizes(axes: Axes, sizes: Sequence[Mapping[str, Any]], across: str, within: str, label: str) -> None:
    """Quality against one measure of size, a line for each value of the other; 'all' groups stand at the right end."""

    def place(row: Mapping[str, Any]) -> float:
        if row[across] is not None:
            return float(row[across])
        return 1.25 * max([float(other[across]) for other in sizes if other[across] is not None], default=1.0)

    lines: dict[Any, list[Mapping[str, Any]]] = {}
    for row in sizes:
        lines.setdefault(row[within], []).append(row)
    shades = np.linspace(0.35, 1.0, len(lines))
    for shade, (value, rows) in zip(shades, sorted(lines.items(), key=lambda item: item[0] or 10**9), strict=True):
        rows = sorted(rows, key=place)
        name = f"{'all' if value is None else value} {within}"
        axes.plot(
            [place(row) for row in rows],
            [row["quality"] for row in rows],
            marker="o",
            color=GAIN,
            alpha=shade,
            label=name,
        )
    chosen = next((row for row in sizes if row.get("is_chosen")), None)
    if chosen is not None:
        axes.plot(
            [place(chosen)],
            [chosen["quality"]],
            marker="o",
            markersize=11,
            fillstyle="none",
            color=INK,
            linestyle="none",
        )
    if any(row[across] is None for row in sizes):
        ticks = sorted({place(row) for row in sizes if row[across] is not None})
        end = max(place(row) for row in sizes)
        axes.set_xticks([*ticks, end], [*(f"{tick:g}" for tick in ticks), "all"])
    axes.grid(axis="y")
    axes.set_xlabel(label)
    axes.set_ylabel("nDCG@10 × 100")
    axes.legend(fontsize=7, labelcolor=MUTED)
