"""`headrank view --case-studies`: the paper's fourteen case studies, each a page or a LaTeX table, from prepared
benchmarks.

A benchmark that is not prepared is left out with a line that says so. Ranks of ICR and RankGPT come from the cells of a
study or matrix.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.errors import InputError
from headrank.evaluation.published import CASE_STUDIES
from headrank.formats import Collection
from headrank.methods import METHODS

if TYPE_CHECKING:
    from headrank.experiments.cells import Cell

_log = logging.getLogger(__name__)
RANKED = ("icr", "rankgpt")  # the paper's columns besides the first stage


def run(args: argparse.Namespace, view: Callable[[argparse.Namespace], int]) -> int:
    """Write a file per case that can be shown; none is an error."""
    from data_tools.benchmarks import BENCHMARKS, benchmark_home, is_ready
    from headrank.experiments.cells import find_cells

    home = benchmark_home(args.home)
    cells = find_cells(args.cells) if args.cells else []
    written = 0
    for name, query_id, paper_text in CASE_STUDIES:
        benchmark = BENCHMARKS[name]
        if not is_ready(benchmark, home):
            _log.warning("%s %s: left out, %s is not prepared in %s", name, query_id, name, home)
            continue
        text = Collection.open(home / name).queries().get(query_id)
        if text is None:
            _log.warning("%s %s: left out, the collection has no such query", name, query_id)
            continue
        if _plain(text) != _plain(paper_text):
            _log.warning("%s %s: the query is %r, the paper's is %r", name, query_id, text, paper_text)
        case = copy.copy(args)
        case.collection, case.query, case.depth = str(home / name), query_id, benchmark.depth
        case.first_stage = METHODS[benchmark.retriever].title
        case.ranks = [
            f"{METHODS[method].title}={cell.path}" for method in RANKED if (cell := _cell(cells, name, method))
        ]
        ending = "tex" if args.format == "latex" else "html"
        case.output = str(Path(args.output) / f"{name}_{query_id}.{ending}")
        written += view(case) == 0
    if not written:
        raise InputError(
            f"--case-studies: none of their benchmarks is prepared in {home}; headrank benchmark prepare NAME "
            "--from ..."
        )
    return 0


def _cell(cells: list[Cell], benchmark: str, method: str) -> Cell | None:
    return next(
        (
            cell
            for cell in cells
            if (cell.benchmark, cell.method, cell.condition[1]) == (benchmark, method, "retriever")
        ),
        None,
    )


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())
