"""Where the core heads are: the layers-by-heads map and the depth distribution."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from headrank.method.heads import HeadSet
from headrank.methods import METHODS
from headrank.reports.figures.style import (
    GRID,
    INK,
    MUTED,
    SEQUENTIAL,
    method_style,
    new_figure,
    readable_on,
    save_figure,
    styled,
    subtitle,
)
from headrank.reports.head_depth import head_depth

_KEY_COLUMNS = {"rank", "name", "layer", "head", "is_chosen"}
_COLUMN_NAMES = {"s_disc": "discriminability S", "g_ent": "entropy gate G", "phi": "selection score Φ"}


def draw_head_map(head_set: HeadSet, path: str | os.PathLike[str]) -> list[Path]:
    """Layers by heads, shaded by the selection's ranking column, chosen heads framed and numbered by rank.

    Writes PATH.png and PATH.pdf. A head set without its table (ICR's, or one written by hand) gives frames on blank
    cells. Layers above l_max, which inference never computes, are below a dashed line.
    """
    values, column = _ranking_values(head_set)
    with styled():
        height = 1.5 + 0.19 * head_set.num_layers
        figure = new_figure(min(10.0, max(4.6, 1.6 + 0.34 * head_set.num_heads)), height)
        axes = figure.subplots()
        axes.set_facecolor("#F4F4F7")
        shown = axes.imshow(values, cmap=SEQUENTIAL, aspect="auto", interpolation="nearest")
        for rank, (layer, head) in enumerate(head_set.heads, start=1):
            if len(head_set.heads) > head_set.num_layers * head_set.num_heads // 2:
                break
            axes.add_patch(
                Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.6, clip_on=False)
            )
            ink = readable_on(SEQUENTIAL(shown.norm(values[layer, head]))) if np.isfinite(values[layer, head]) else INK
            axes.text(head, layer, str(rank), ha="center", va="center", fontsize=7.5, fontweight="bold", color=ink)
        if head_set.l_max + 1 < head_set.num_layers:
            axes.axhline(head_set.l_max + 0.5, color=INK, linestyle="--", linewidth=1.0)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        step = 1 if head_set.num_layers <= 16 else 2 if head_set.num_layers <= 40 else 4
        axes.set_yticks(range(0, head_set.num_layers, step))
        axes.set_xticks(range(0, head_set.num_heads, 1 if head_set.num_heads <= 20 else 4))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if column:
            bar = figure.colorbar(shown, ax=axes, shrink=0.7, pad=0.03)
            bar.set_label(_COLUMN_NAMES.get(column.lower(), column))
            bar.outline.set_visible(False)
        used = f"computed to layer {head_set.l_max}: {head_set.l_max + 1} of {head_set.num_layers}"
        subtitle(
            axes,
            f"{len(head_set.heads)} {head_set.method} head{'s' * (len(head_set.heads) != 1)} of "
            f"{Path(head_set.model).name}",
            used,
        )
        return save_figure(figure, path)


def _ranking_values(head_set: HeadSet) -> tuple[np.ndarray, str]:
    """The last numeric column of the table as [layer, head], NaN where the table is silent, and its name."""
    values = np.full((head_set.num_layers, head_set.num_heads), np.nan)
    columns = [key for key in (head_set.table[0] if head_set.table else {}) if key not in _KEY_COLUMNS]
    if not columns:
        return values, ""
    for row in head_set.table:
        number = row.get(columns[-1])
        if isinstance(number, (int, float)) and {"layer", "head"} <= row.keys():
            values[int(row["layer"]), int(row["head"])] = float(number)
    return values, columns[-1]


def draw_head_depth(head_sets: Mapping[str, HeadSet], path: str | os.PathLike[str]) -> list[Path]:
    """One column per head set, a dot for every core head at its layer (side by side where a layer holds several); the
    short dashed line is l_max, above which nothing is computed. All sets must come from models of the same depth.
    """
    num_layers = max(heads.num_layers for heads in head_sets.values())
    with styled():
        figure = new_figure(max(4.2, 1.3 + 1.15 * len(head_sets)), 4.4)
        axes = figure.subplots()
        axes.set_ylim(-1, num_layers + 0.6)
        axes.grid(axis="y")
        for place, heads in enumerate(head_sets.values()):
            style = method_style(
                next((method.name for method in METHODS.values() if method.selection == heads.method), heads.method)
            )
            for layer, count in enumerate(head_depth(heads).counts):
                spread = min(0.16, 0.7 / max(count, 1))
                offsets = (np.arange(count) - (count - 1) / 2) * spread
                axes.scatter(
                    place + offsets,
                    [layer] * count,
                    s=34,
                    color=style.colour,
                    edgecolor="white",
                    linewidth=0.6,
                    zorder=3,
                )
            axes.plot([place - 0.42, place + 0.42], [heads.l_max + 0.5] * 2, color=INK, linestyle="--", linewidth=1.2)
            axes.text(
                place + 0.42,
                heads.l_max + 0.7,
                f"exit at {heads.l_max}",
                ha="right",
                va="bottom",
                fontsize=7.5,
                color=MUTED,
            )
            axes.fill_between(
                [place - 0.42, place + 0.42], heads.l_max + 0.5, num_layers - 0.5, color=GRID, alpha=0.35, linewidth=0
            )
        axes.set_xticks(range(len(head_sets)), list(head_sets))
        axes.set_xlim(-0.6, len(head_sets) - 0.4)
        axes.set_ylabel("layer")
        axes.tick_params(axis="x", length=0)
        subtitle(axes, "Depth of the core heads", "grey layers are never computed")
        return save_figure(figure, path)
