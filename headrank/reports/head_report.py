"""`headrank report --heads`: the before/after table with shared heads, the paper's beside it, depth bands, head
maps, the depth figure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrank.evaluation.published import published_heads
from headrank.formats import atomic_write
from headrank.method.heads import HeadSet, head_name
from headrank.reports.grids import Grid, GridRow
from headrank.reports.head_depth import HeadChange, compare_heads, describe_change, head_depth
from headrank.reports.page import Block, Bullets, Picture
from headrank.reports.table_text import to_latex

SHARED_MARK = "✓"


def head_blocks(sets: Mapping[str, HeadSet], figures: Path, paper_model: str | None = None) -> list[Block]:
    """Everything to say about one or more head sets: changes from the first to each later one, the paper's heads, depth
    figure, maps.

    ``paper_model`` names the model whose heads the paper lists (Table 4); by default it is read from the name of the
    sets' model.
    """
    from headrank.reports.figures import draw_head_depth, draw_head_map

    blocks: list[Block] = []
    labels = list(sets)
    same_shape = [label for label in labels[1:] if _shape(sets[label]) == _shape(sets[labels[0]])]
    for label in same_shape:
        change = compare_heads(sets[labels[0]], sets[label])
        blocks += [change_grid(change, labels[0], label), Bullets(tuple(describe_change(change)))]
    if len(labels) == 1:
        blocks.append(_single_grid(sets[labels[0]]))
    known = paper_model or model_in_paper(sets[labels[0]].model)
    if known is not None:
        blocks += paper_grids(sets, known)
    depths = {label: sets[label] for label in [labels[0], *same_shape]}
    png, _ = draw_head_depth(depths, figures / "head_depth")
    summary = "; ".join(
        f"{label}: layers {head_depth(heads).band[0]} to {head_depth(heads).band[1]}" for label, heads in depths.items()
    )
    blocks.append(
        Picture(
            png,
            f"Depth of the core heads. {summary}.",
            "Each dot is a core head at its layer; grey layers are never computed.",
        )
    )
    for place, (label, heads) in enumerate(sets.items(), start=1):  # numbered: labels may differ in punctuation alone
        png, _ = draw_head_map(heads, figures / f"head_map_{place}_{_slug(label)}")
        names = ", ".join(head_name(head) for head in heads.heads[:16])
        blocks.append(
            Picture(
                png,
                f"Head map, {label}: chosen heads {names}.",
                f"Head map, {label}: chosen heads framed, numbered by rank.",
            )
        )
    return blocks


def change_grid(change: HeadChange, before: str, after: str) -> Grid:
    """The paper's table: rank, head before, head after, and a mark where the head after was there before."""
    rows = [(str(rank), old, new, SHARED_MARK if is_shared else "") for rank, old, new, is_shared in change.rows()]
    rows.append(("Shared", "", "", f"{len(change.shared)} / {len(change.after.heads)}"))
    return Grid(f"Core heads, {before} and {after}", ("Rank", before, after, "Shared"), tuple(rows))


def model_in_paper(model: str) -> str | None:
    """The model of the paper's head table that a path or hub name names: 'runs/qwen3-0.6b/hf' is Qwen3-0.6B."""
    return next((name for name in published_heads() if name.lower() in model.lower()), None)


def paper_grids(sets: Mapping[str, HeadSet], model: str) -> list[Block]:
    """The paper's heads rank by rank beside ours, and how many of them each of our sets shares."""
    paper = {f"{moment} (paper)": heads for moment, heads in published_heads()[model].items()}
    columns = {**{label: list(heads.heads) for label, heads in sets.items()}, **paper}
    length = max(map(len, columns.values()))
    ranks = tuple(
        (str(place + 1), *(head_name(heads[place]) if place < len(heads) else "" for heads in columns.values()))
        for place in range(length)
    )
    shared = []
    for label, heads in sets.items():
        counts = (f"{len(set(heads.heads) & set(listed))} / {len(listed)}" for listed in paper.values())
        common = [head_name(head) for head in heads.heads if any(head in listed for listed in paper.values())]
        shared.append(GridRow((label, *counts, ", ".join(common) or "none")))
    note = (f"Rows marked as the paper's are its Table 4 for {model}, not ours.",)
    return [
        Grid(f"Core heads, ours and the paper's ({model})", ("Rank", *columns), ranks, notes=note),
        Grid("Heads shared with the paper's", ("Set", *paper, "In common"), tuple(shared)),
    ]


def write_head_table(change: HeadChange, before: str, after: str, path: str | os.PathLike[str]) -> None:
    """The table of before and after as LaTeX."""
    with atomic_write(path) as stream:
        stream.write(to_latex(change_grid(change, before, after)))


def _single_grid(heads: HeadSet) -> Grid:
    """One set: its heads, best first, with the selection's columns where the file has them."""
    chosen = {(row.get("layer"), row.get("head")): row for row in heads.table}
    first: Mapping = heads.table[0] if heads.table else {}
    columns = [name for name in first if name not in ("rank", "name", "layer", "head", "is_chosen")]
    rows = []
    for rank, head in enumerate(heads.heads, start=1):
        row = chosen.get(head, {})
        rows.append(
            (
                str(rank),
                head_name(head),
                *(f"{row[name]:.4g}" if isinstance(row.get(name), float) else "" for name in columns),
            )
        )
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
