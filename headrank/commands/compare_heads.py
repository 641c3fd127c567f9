"""`headrank select-heads --compare-paper`: the paper's selection under every reading of I_q, against the paper's head
table.

The paper says "query tokens" and does not give its prompt, so which rows it averages is the first thing to find out
about a Qwen3 model: the reading that shares most heads with Table 4 is the likely one. It costs one selection per
reading and no training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from headrank.errors import InputError
from headrank.evaluation.published import published_heads
from headrank.method.heads import HeadSet, head_name
from headrank.method.prompt import QUERY_ROWS
from headrank.reports.grids import Grid
from headrank.reports.head_report import model_in_paper
from headrank.reports.table_text import to_markdown

Select = Callable[[argparse.Namespace], HeadSet]


def run(args: argparse.Namespace, select: Select) -> list[Path]:
    """Select with each row mode, write OUTPUT's stem + mode, print the comparison; returns the files."""
    model = paper_model(args)
    output = Path(args.output)
    found: dict[str, HeadSet] = {}
    written = []
    for rows in [args.query_rows] if args.query_rows is not None else QUERY_ROWS:
        chosen = copy.copy(args)
        chosen.query_rows = rows
        found[rows] = select(chosen)
        path = output.with_name(f"{output.stem}.{rows}{output.suffix or '.json'}")
        found[rows].save(path)
        written.append(path)
    print(to_markdown(comparison(found, model)), end="")
    return written


def paper_model(args: argparse.Namespace) -> str:
    """--compare-paper NAME, or the model's own name."""
    known = list(published_heads())
    name: str | None = model_in_paper(str(args.model)) if args.compare_paper == "auto" else args.compare_paper
    if name not in known:
        raise InputError(
            f"--compare-paper: the paper lists heads of {', '.join(known)}; {args.model} names none of them, give one"
        )
    return name


def comparison(found: dict[str, HeadSet], model: str) -> Grid:
    """A row per reading: heads in common with the paper's before-training list, had it counted from 0 or from 1, and
    their names.
    """
    listed = published_heads()[model]["before"]
    from_one = [(layer - 1, head - 1) for layer, head in listed]
    rows = []
    for reading, heads in found.items():
        common = [head for head in heads.heads if head in listed]
        rows.append(
            (reading, _share(heads, listed), _share(heads, from_one), ", ".join(map(head_name, common)) or "none")
        )
    note = f"The paper's: {', '.join(map(head_name, listed))}. The reading with most heads in common is the likely one."
    headers = ("I_q", "shared with the paper's", "if it counts from 1", "in common")
    return Grid(
        f"Selected heads and the paper's Table 4 ({model}, before training)", headers, tuple(rows), notes=(note,)
    )


def _share(heads: HeadSet, listed: Sequence[tuple[int, int]]) -> str:
    return f"{len(set(heads.heads) & set(listed))} / {len(listed)}"
