"""Draw docs/pipeline.png, the picture at the top of the README: python docs/draw_pipeline.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PAPER, INK, SOFT = "#fbfaf7", "#22303c", "#5c6b78"  # an opaque light card reads the same on a dark page
BLUE, GREEN, ORANGE, RED = "#dbe8f4", "#dcefe0", "#fbe6cc", "#f6d9d5"
EDGE = {BLUE: "#3f72a6", GREEN: "#3d8a58", ORANGE: "#b9771f", RED: "#b4463a"}

# (left, bottom, colour, title, command, what comes out)
STAGES = [
    (0.2, 6.0, BLUE, "candidates", "headrank retrieve", "run.bm25.txt"),
    (3.5, 6.0, BLUE, "ALPS pairs", "headrank pairs", "pairs.jsonl, contexts.jsonl"),
    (6.8, 6.0, GREEN, "core heads", "headrank select-heads", "heads.json"),
    (10.1, 6.0, ORANGE, "preference training", "torchrun pretrain_headrank.py", "iter_NNNNNNN/"),
    (10.1, 4.0, GREEN, "core heads again", "headrank select-heads", "heads.json, trained"),
    (6.8, 4.0, ORANGE, "Hugging Face model", "headrank export-hf", "safetensors + headrank.json"),
    (3.5, 4.0, RED, "reranking", "headrank rerank", "run.txt"),
    (0.2, 4.0, BLUE, "the table", "headrank evaluate | report", "metrics, figures, viewer"),
]
WIDTH, HEIGHT = 2.9, 1.35


def draw_stage(axes: Axes, left: float, bottom: float, colour: str, title: str, command: str, output: str) -> None:
    """One box: what happens, the command, the file that comes out."""
    box = FancyBboxPatch(
        (left, bottom), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec=EDGE[colour], lw=1.3
    )
    axes.add_patch(box)
    middle = left + WIDTH / 2
    axes.text(middle, bottom + 1.03, title, ha="center", va="center", fontsize=12.5, weight="bold", color=INK)
    axes.text(middle, bottom + 0.64, command, ha="center", va="center", fontsize=9.2, family="monospace", color=INK)
    axes.text(middle, bottom + 0.27, output, ha="center", va="center", fontsize=9.5, style="italic", color=SOFT)


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """An arrow between two points."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=15, lw=1.6, color=SOFT, shrinkA=0, shrinkB=0, **style
        )
    )


def draw_prompt(axes: Axes) -> None:
    """The lower half: one sequence, the rows that are read, the layers that are never computed."""
    axes.text(0.2, 3.32, "One truncated pass for one query", fontsize=12.5, weight="bold", color=INK, va="center")
    pieces = [("[1] passage", 2.0, BLUE), ("[2] passage", 2.0, BLUE), ("…", 0.7, BLUE), ("[40] passage", 2.0, BLUE)]
    left, bottom, height = 0.2, 0.35, 0.55
    for text, width, colour in [*pieces, ("query", 1.35, RED), ("“N/A”", 1.15, GREEN)]:
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom),
                width - 0.06,
                height,
                boxstyle="round,pad=0,rounding_size=0.06",
                fc=colour,
                ec=EDGE[colour],
            )
        )
        axes.text(left + width / 2 - 0.03, bottom + height / 2, text, ha="center", va="center", fontsize=10, color=INK)
        left += width
    query, calibration = 7.55, 8.8
    for x, heights in ((1.2, 0.42), (3.2, 0.95), (4.55, 0.25), (5.9, 0.55)):
        axes.add_patch(
            FancyBboxPatch((x - 0.28, 1.15), 0.56, heights, boxstyle="square,pad=0", fc="#e0a19a", ec=EDGE[RED], lw=0.9)
        )
    for x in (1.2, 3.2, 4.55, 5.9):
        axes.add_patch(
            FancyArrowPatch(
                (query, 0.95),
                (x + 0.3, 1.28),
                arrowstyle="-",
                connectionstyle="arc3,rad=0.16",
                color=EDGE[RED],
                lw=0.9,
                alpha=0.55,
                zorder=0.5,
            )
        )
    axes.text(0.2, 2.72, "document score = attention mass of a few core heads,", fontsize=10.5, color=INK, va="center")
    axes.text(
        0.2, 2.4, "from the query's rows, minus that of a content-free query", fontsize=10.5, color=INK, va="center"
    )
    axes.text(calibration, 1.22, "calibration", ha="center", fontsize=9, color=EDGE[GREEN], style="italic")
    for layer in range(9):
        used = layer < 5
        bottom = 0.35 + 0.31 * layer
        axes.add_patch(
            FancyBboxPatch(
                (9.95, bottom),
                1.45,
                0.24,
                boxstyle="round,pad=0,rounding_size=0.04",
                fc="#cfd9e2" if used else PAPER,
                ec=SOFT,
                lw=0.9,
                ls="-" if used else (0, (3, 2)),
            )
        )
        if layer in (1, 3, 4):
            for head in (0.3, 0.85) if layer == 3 else (0.55,):
                axes.plot(9.95 + head, bottom + 0.12, "o", ms=5.5, color=EDGE[RED])
    axes.text(11.55, 0.35 + 0.31 * 4 + 0.12, "deepest core head:", fontsize=9.5, va="center", color=EDGE[RED])
    axes.text(11.55, 0.35 + 0.31 * 3 + 0.12, "the pass ends here", fontsize=9.5, va="center", color=EDGE[RED])
    axes.text(11.55, 0.35 + 0.31 * 7 + 0.12, "not computed,", fontsize=9.5, va="center", color=SOFT)
    axes.text(11.55, 0.35 + 0.31 * 6 + 0.12, "not loaded", fontsize=9.5, va="center", color=SOFT)


def main() -> None:
    """Write the picture beside this file."""
    figure, axes = plt.subplots(figsize=(13.2, 7.4), dpi=110)
    figure.patch.set_facecolor(PAPER)
    axes.set_xlim(0, 13.2)
    axes.set_ylim(0, 7.6)
    axes.axis("off")
    for stage in STAGES:
        draw_stage(axes, *stage)
    for left in (0.2, 3.5, 6.8):
        draw_arrow(axes, (left + WIDTH, 6.67), (left + 3.3, 6.67))
        draw_arrow(axes, (left + 3.3, 4.67), (left + WIDTH, 4.67))
    draw_arrow(axes, (11.55, 6.0), (11.55, 5.35))
    axes.plot([0.2, 13.0], [3.68, 3.68], color="#d8d4ca", lw=1)
    draw_prompt(axes)
    figure.subplots_adjust(0.005, 0.01, 0.995, 0.99)
    figure.savefig(Path(__file__).with_name("pipeline.png"), facecolor=PAPER, metadata={"Software": None})


if __name__ == "__main__":
    main()
