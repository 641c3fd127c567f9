"""Did it get better, where, and at what cost: measures with intervals, gains per query, latency against
effectiveness.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from headrank.methods import method_name, method_order
from headrank.reports.figures.style import (
    GAIN,
    INK,
    LOSS,
    MUTED,
    WIDTH,
    halo,
    method_style,
    new_figure,
    save_figure,
    styled,
    subtitle,
)
from headrank.reports.pareto import CostPoint, pareto_frontier

Interval = tuple[float, float]
_LEARNING_CHARTS = (  # title, name in training events, name in held-out events
    ("loss", "total", ""),
    ("preference accuracy", "accuracy", "preference_accuracy"),
    ("held-out NDCG@10", "", "ndcg@10"),
    ("score margin", "score_margin", ""),
    ("middle-zone std, scaled", "middle_std", ""),
    ("score entropy", "entropy", ""),
)


def draw_measures(
    rows: Sequence[tuple[str, str, float, Interval]], measure: str, path: str | os.PathLike[str], note: str = ""
) -> list[Path]:
    """One horizontal line per row: (method, label, mean, interval), values as fractions; the mark is the mean, the
    bar its interval.
    """
    with styled():
        figure = new_figure(WIDTH, 0.95 + 0.34 * len(rows))
        axes = figure.subplots()
        for place, (method, _, mean, (low, high)) in enumerate(rows):
            style = method_style(method)
            axes.plot(
                [100 * low, 100 * high],
                [place, place],
                color=style.colour,
                linewidth=3,
                alpha=0.45,
                solid_capstyle="round",
            )
            axes.plot(100 * mean, place, color=style.colour, marker=style.marker, markeredgecolor="white", markersize=8)
            axes.annotate(
                f"{100 * mean:.1f}",
                (100 * high, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(rows)), [label for _, label, _, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.1)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"{measure} × 100")
        subtitle(axes, f"{measure} with bootstrap intervals", note)
        return save_figure(figure, path)


def draw_query_changes(
    changes: Mapping[str, float], measure: str, path: str | os.PathLike[str], title: str, labels: int = 3
) -> list[Path]:
    """Every query's change, largest gain first; the outermost queries are named. Values are fractions."""
    ordered = sorted(changes.items(), key=lambda item: (-item[1], item[0]))
    with styled():
        figure = new_figure(WIDTH, 2.9)
        axes = figure.subplots()
        heights = [100 * value for _, value in ordered]
        axes.bar(range(len(ordered)), heights, width=0.85, color=[GAIN if value > 0 else LOSS for value in heights])
        axes.axhline(0, color=INK, linewidth=0.8)
        won, lost = sum(value > 0 for value in heights), sum(value < 0 for value in heights)
        for place, (query_id, value) in enumerate(ordered):
            if (place < labels and value > 0) or (place >= len(ordered) - labels and value < 0):
                axes.annotate(
                    query_id,
                    (place, 100 * value),
                    xytext=(0, 3 if value > 0 else -3),
                    textcoords="offset points",
                    rotation=90,
                    fontsize=6.5,
                    color=MUTED,
                    ha="center",
                    va="bottom" if value > 0 else "top",
                )
        axes.margins(x=0.02, y=0.3)
        axes.set_xticks([])
        axes.set_xlabel("queries, largest gain first")
        axes.set_ylabel(f"change of {measure} × 100")
        axes.grid(axis="y")
        subtitle(axes, title, f"better on {won} queries, worse on {lost}, equal on {len(ordered) - won - lost}")
        return save_figure(figure, path)


def draw_pareto(
    points: Sequence[CostPoint], measure: str, path: str | os.PathLike[str], levels: Mapping[str, float] | None = None
) -> list[Path]:
    """Seconds a query (log axis) against a measure; the Pareto frontier is a line through ringed marks. Values are
    fractions.

    ``levels`` are methods without a time of their own (the first stage), drawn as dotted lines across.
    """
    frontier = pareto_frontier(points)
    models = list(dict.fromkeys(point.model for point in points if point.model))
    with styled():
        figure = new_figure(WIDTH, 4.0)
        axes = figure.subplots()
        axes.plot(
            [point.seconds for point in frontier],
            [100 * point.value for point in frontier],
            color=INK,
            linewidth=1.0,
            linestyle="--",
            zorder=1,
            drawstyle="steps-post",
            label="Pareto frontier",
        )
        middle = math.sqrt(min(point.seconds for point in points) * max(point.seconds for point in points))
        for point in sorted(points, key=lambda point: method_order(point.method)):
            _draw_point(axes, point, models, is_best=point in frontier, is_right=point.seconds > middle)
        for method, value in (levels or {}).items():
            _draw_level(axes, method, value)
        axes.set_xscale("log")
        is_narrow = max(point.seconds for point in points) < 10 * min(point.seconds for point in points)
        axes.xaxis.set_major_locator(MaxNLocator(6) if is_narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        axes.margins(x=0.16, y=0.12)
        axes.grid(which="major")
        axes.set_xlabel("seconds per query (log)")
        axes.set_ylabel(f"{measure} × 100")
        axes.legend(loc="lower right")
        subtitle(axes, f"Latency against {measure}", "ringed and bold: no method is both faster and better")
        _part_names(figure, axes)
        return save_figure(figure, path)


def _draw_point(axes: Axes, point: CostPoint, models: Sequence[str], *, is_best: bool, is_right: bool) -> None:
    """One mark with its name, on the side where there is room; larger marks are later (larger) models."""
    style = method_style(point.method)
    size = 60 + 45 * (models.index(point.model) if point.model in models else 0)
    edge, width = (INK, 1.4) if is_best else ("white", 0.6)
    axes.scatter(
        point.seconds,
        100 * point.value,
        s=size,
        color=style.colour,
        marker=style.marker,
        zorder=3,
        edgecolor=edge,
        linewidth=width,
    )
    name = (
        f"{method_name(point.method)}, {point.model}" if len(models) > 1 and point.model else method_name(point.method)
    )
    weight = "bold" if is_best else "normal"
    axes.annotate(
        name,
        (point.seconds, 100 * point.value),
        xytext=(-7 if is_right else 7, 5),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontsize=8,
        fontweight=weight,
        path_effects=halo(),
        zorder=4,
    )


def _part_names(figure: Figure, axes: Axes) -> None:
    """Move a name up, line by line, while it lies on one drawn before it: points that nearly coincide keep readable
    names.
    """
    figure.draw_without_rendering()
    placed: list[Bbox] = []
    for text in (text for text in axes.texts if isinstance(text, Annotation)):
        while any(text.get_window_extent().overlaps(box) for box in placed):
            text.xyann = (text.xyann[0], text.xyann[1] + 3)
        placed.append(text.get_window_extent())


def _draw_level(axes: Axes, method: str, value: float) -> None:
    """A dotted line across, named at its right end."""
    axes.axhline(100 * value, color=method_style(method).colour, linestyle=":", linewidth=1.4, zorder=1)
    place: tuple[float, float] = (1, 100 * value)
    axes.annotate(
        method_name(method),
        place,
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=MUTED,
        path_effects=halo(),
    )


def draw_learning_curves(
    events: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], path: str | os.PathLike[str]
) -> list[Path]:
    """A small chart for each logged quantity people watch; training in grey with its running mean, held-out values
    as marks.
    """
    train, valid = events.get("train", {}), events.get("valid", {})
    charts = [chart for chart in _LEARNING_CHARTS if chart[1] in train or chart[2] in valid]
    with styled():
        columns = min(3, max(len(charts), 1))
        rows = -(-max(len(charts), 1) // columns)
        figure = new_figure(WIDTH, 0.5 + 1.9 * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (title, train_name, valid_name) in zip(grid.flat, charts, strict=False):
            if train_name in train:
                steps, values = zip(*train[train_name], strict=True)
                axes.plot(steps, values, color=MUTED, alpha=0.35, linewidth=0.9)
                axes.plot(steps, _running_mean(values), color=method_style("headrank").colour)
            if valid_name in valid:
                axes.plot(
                    *zip(*valid[valid_name], strict=True),
                    color=INK,
                    marker="o",
                    markersize=4,
                    linewidth=1.0,
                    linestyle="--",
                )
            axes.set_title(title, fontsize=9.5)
            axes.grid(axis="y")
        for axes in list(grid.flat)[len(charts) :]:
            axes.set_visible(False)
        figure.supxlabel("iteration (line: running mean of training; dots: held-out)", fontsize=8.5)
        return save_figure(figure, path)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the last tenth of the values up to each point."""
    width = max(1, len(values) // 10)
    return [sum(values[max(0, end - width) : end]) / min(end, width) for end in range(1, len(values) + 1)]
