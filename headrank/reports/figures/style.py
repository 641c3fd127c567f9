"""The one place that decides how figures look: palette, marks, sizes, saving.

Colours are Paul Tol's "bright" and "light" schemes, which stay apart under the common kinds of colour blindness; marks
and hatches repeat the difference for print in grey. Nothing here touches matplotlib's global state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from headrank.files import atomic_write

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells every glyph it embeds into a PDF

INK, MUTED, GRID, PAPER = "#222233", "#666677", "#DDDDE4", "#FFFFFF"
GAIN, LOSS = "#4477AA", "#EE7733"
SEQUENTIAL = LinearSegmentedColormap.from_list("headrank", ["#FBF9FD", "#E3D3EC", "#C79CCB", "#AA3377", "#5A1240"])
_INK_LUMINANCE = 0.0166
DPI = 200
WIDTH = 7.0  # inches: a text column of a report page

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.0,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # real text in the PDF, not outlines
}


@dataclass(frozen=True)
class MethodStyle:
    """Colour, marker and line of one method, the same in every figure."""

    colour: str
    marker: str
    line: str


_METHODS = {
    "bm25": MethodStyle("#888888", "o", ":"),
    "colbertv2": MethodStyle("#888888", "H", ":"),
    "rankgpt": MethodStyle("#CCBB44", "X", "-."),
    "icr": MethodStyle("#66CCEE", "s", "--"),
    "core": MethodStyle("#228833", "^", "-"),
    "qr": MethodStyle("#4477AA", "v", "--"),
    "niah": MethodStyle("#EE6677", "P", "-."),
    "headrank": MethodStyle("#AA3377", "D", "-"),
}
_SPARE = (
    MethodStyle("#77AADD", "<", "-"),
    MethodStyle("#EE8866", ">", "--"),
    MethodStyle("#BBCC33", "p", "-."),
    MethodStyle("#44BB99", "h", ":"),
    MethodStyle("#AAAA00", "*", "-"),
)
_VARIANT_MARKS = ("d", "*", "8", "p", "h")


def method_style(method: str) -> MethodStyle:
    """The style of a method; a variant ('headrank+control') keeps its method's colour with another mark and a dashed
    line.
    """
    base, plus, variant = method.partition("+")
    known = _METHODS.get(base) or _SPARE[sum(base.encode()) % len(_SPARE)]
    if not plus:
        return known
    return MethodStyle(known.colour, _VARIANT_MARKS[sum(variant.encode()) % len(_VARIANT_MARKS)], "--")


@contextmanager
def styled() -> Iterator[None]:
    """Apply the settings inside a ``with`` block only."""
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: float = WIDTH, height: float = 3.4, **kwargs: Any) -> Figure:
    """An empty figure that lays itself out; call inside ``styled()``."""
    figure = Figure(figsize=(width, height), layout="constrained", **kwargs)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write PATH.png and PATH.pdf (an ending of either kind is dropped first); the same figure gives the same bytes."""
    stem = Path(path)
    if stem.suffix in (".png", ".pdf"):
        stem = stem.with_suffix("")
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, pdf = stem.parent / f"{stem.name}.png", stem.parent / f"{stem.name}.pdf"
    with atomic_write(png, "wb") as stream:
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout is done; solving it again would cost as much as the drawing
    with atomic_write(pdf, "wb") as stream:
        figure.savefig(stream, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]


def subtitle(axes: Axes, title: str, note: str = "") -> None:
    """A left-aligned bold title with one muted line below it."""
    axes.set_title(title, pad=20 if note else 8)
    if note:
        axes.text(
            0, 1, note, transform=axes.transAxes, va="bottom", ha="left", color=MUTED, fontsize=8.5, linespacing=1.6
        )


def title_width(title: str) -> float:
    """Inches that a bold title needs, so that a panel is made wide enough for its name."""
    return 0.2 + 0.105 * len(title)


def readable_on(fill: Any) -> str:
    """Ink or paper, whichever has the higher WCAG contrast on a fill colour (red, green, blue as fractions)."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in fill[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return PAPER if 1.05 / (luminance + 0.05) > (luminance + 0.05) / (_INK_LUMINANCE + 0.05) else INK


def halo() -> list[Any]:
    """Path effects that keep a label readable where a line crosses it."""
    return [withStroke(linewidth=2.5, foreground=PAPER)]
