"""`headrank report --heads`: the paper's before/after table with shared heads and depth bands, head maps and the depth figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrank.formats import atomic_write
from headrank.method.heads import HeadSet, head_name
from headrank.reports.head_depth import HeadChange, compare_heads, describe_change, head_depth
from headrank.reports.page import Block, Bullets, Grid, Picture
from headrank.reports.table_text import latex_escape

SHARED_MARK = "✓"


def head_blocks(sets: Mapping[str, HeadSet], figures: Path) -> list[Block]:
    """Everything to say about one or more head sets: changes from the first to each later one, depth figure, maps."""
    from headrank.reports.figures import draw_head_depth, draw_head_map

    blocks: list[Block] = []
    labels = list(sets)
    same_shape = [label for label in labels[1:] if _shape(sets[label]) == _shape(sets[labels[0]])]
    for label in same_shape:
        change = compare_heads(sets[labels[0]], sets[label])
        blocks += [change_grid(change, labels[0], label), Bullets(tuple(describe_change(change)))]
    if len(labels) == 1:
        blocks.append(_single_grid(sets[labels[0]]))
    depths = {label: sets[label] for label in [labels[0], *same_shape]}
    png, _ = draw_head_depth(depths, figures / "head_depth")
    summary = "; ".join(f"{label}: layers {head_depth(heads).band[0]} to {head_depth(heads).band[1]}" for label, heads in depths.items())
    blocks.append(
        Picture(png, f"Depth of the core heads. {summary}.", "Each dot is a core head at its layer; grey layers are never computed.")
    )
    for place, (label, heads) in enumerate(sets.items(), start=1):  # numbered: labels may differ in punctuation alone
        png, _ = draw_head_map(heads, figures / f"head_map_{place}_{_slug(label)}")
        names = ", ".join(head_name(head) for head in heads.heads[:16])
        blocks.append(
            Picture(png, f"Head map, {label}: chosen heads {names}.", f"Head map, {label}: chosen heads framed, numbered by rank.")
        )
    return blocks


def change_grid(change: HeadChange, before: str, after: str) -> Grid:
    """The paper's table: rank, head before, head after, and a mark where the head after was there before."""
    rows = [(str(rank), old, new, SHARED_MARK if is_shared else "") for rank, old, new, is_shared in change.rows()]
    rows.append(("Shared", "", "", f"{len(change.shared)} / {len(change.after.heads)}"))
    return Grid(f"Core heads, {before} and {after}", ("Rank", before, after, "Shared"), tuple(rows))


def write_head_table(change: HeadChange, before: str, after: str, path: str | os.PathLike[str]) -> None:
    """The same table as LaTeX (booktabs)."""
    lines = [
        r"% needs \usepackage{booktabs, pifont}",
        r"\begin{tabular}{@{} c ccc @{}}",
        r"\toprule",
        rf"\textbf{{Rank}} & \textbf{{{latex_escape(before)}}} & \textbf{{{latex_escape(after)}}} & \textbf{{Shared}} \\",
        r"\midrule",
    ]
    for rank, old, new, is_shared in change.rows():
        lines.append(" & ".join([str(rank), old, new, r"\ding{51}" if is_shared else ""]) + r" \\")
    lines += [r"\midrule", rf"\textbf{{Shared}} & \multicolumn{{3}}{{c}}{{{len(change.shared)}\,/\,{len(change.after.heads)}}} \\"]
    with atomic_write(path) as stream:
        stream.write("\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))


def _single_grid(heads: HeadSet) -> Grid:
    """One set: its heads, best first, with the selection's columns where the file has them."""
    chosen = {(row.get("layer"), row.get("head")): row for row in heads.table}
    first: Mapping = heads.table[0] if heads.table else {}
    columns = [name for name in first if name not in ("rank", "name", "layer", "head", "is_chosen")]
    rows = []
    for rank, head in enumerate(heads.heads, start=1):
        row = chosen.get(head, {})
        rows.append((str(rank), head_name(head), *(f"{row[name]:.4g}" if isinstance(row.get(name), float) else "" for name in columns)))
    return Grid(f"Core heads of {Path(heads.model).name} ({heads.method})", ("Rank", "Head", *columns), tuple(rows))


def label_paths(paths: Sequence[str]) -> dict[str, str]:
    """Label -> file: LABEL=FILE, else 'before' and 'after' for two files, else the file names without their ending."""
    labels: dict[str, str] = {}
    for place, text in enumerate(paths):
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = ("before", "after")[place] if len(paths) == 2 else Path(text).name.removesuffix(".json"), text
        while name in labels:
            name = f"{Path(path).resolve().parent.name}/{name}" if "/" not in name else f"{name}'"
        labels[name] = path
    return labels


def _shape(heads: HeadSet) -> tuple[int, int]:
    return heads.num_layers, heads.num_heads


def _slug(label: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in label).strip("_").lower() or "heads"
