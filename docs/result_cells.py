"""What the tables of docs/ are made of: the cells of results/ by row, differences with their intervals, Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from headrank.evaluation.significance import bootstrap_interval
from headrank.experiments.cell_archive import ArchivedCell, read_archive
from headrank.experiments.cells import Cell

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"

COLLECTIONS = {  # title -> benchmark, measure
    "TREC DL 2019": ("dl19", "nDCG@10"),
    "HotpotQA, Recall@5": ("hotpotqa100", "R@5"),
    "NFCorpus": ("nfcorpus", "nDCG@10"),
    "NovelEval": ("noveleval", "nDCG@10"),
}
DEEP = ("TREC DL 2019", "NFCorpus")  # the collections with 40 candidates per query
Row = tuple[str, str, str]  # model, method, order: one row of a table, all of its seeds
PerQuery = Mapping[str, float]


@lru_cache(maxsize=1)
def cells() -> dict[tuple[str, int, Row], list[Cell]]:
    """(benchmark, depth, row) -> its seeds. The folder names of the study tell rows of one model and method apart."""
    found: dict[tuple[str, int, Row], list[Cell]] = {}
    for cell in read_archive(RESULTS):
        assert isinstance(cell, ArchivedCell)
        folder = cell.place.split("/")[2]
        depth, order = cell.condition
        found.setdefault((cell.benchmark, depth, (folder, cell.method, order)), []).append(cell)
    return found


def per_query(title: str, row: Row, depth: int, words: str = "") -> dict[str, float] | None:
    """The row's value of every query, its mean over the seeds, in percent; None where it was not run. ``words`` is
    "" or SHORT.
    """
    benchmark, measure = COLLECTIONS[title]
    seeds = [cell.per_query(measure) for cell in cells().get((benchmark + words, depth, row), [])]
    if not seeds:
        return None
    return {query_id: 100 * fmean(seed[query_id] for seed in seeds) for query_id in seeds[0]}


def mean(title: str, row: Row, depth: int) -> str:
    """53.5, or '-' where the row was not run."""
    values = per_query(title, row, depth)
    return "-" if values is None else f"{fmean(values.values()):.1f}"


def difference(one: PerQuery | None, other: PerQuery | None) -> str:
    """one minus other over the queries: '+4.0 [1.3, 6.8]', bold when the 95% bootstrap interval excludes zero."""
    if one is None or other is None:
        return "-"
    assert one.keys() == other.keys(), "a difference needs the same queries"
    values = [one[query_id] - other[query_id] for query_id in one]
    low, high = bootstrap_interval(values)
    text = f"{fmean(values):+.1f} [{round(low, 1) + 0.0:.1f}, {round(high, 1) + 0.0:.1f}]"  # + 0.0: no "-0.0"
    return f"**{text}**" if low > 0 or high < 0 else text


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One Markdown table, numbers to the right."""
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def average(row: Row) -> str:
    """Mean over the four collections at depth 20, each counting once."""
    return f"{fmean(fmean((per_query(title, row, 20) or {}).values()) for title in COLLECTIONS):.1f}"


def kept(file: str) -> dict[str, PerQuery]:
    """name -> query id -> percent, of one of the JSON files of results/."""
    values = json.loads((RESULTS / file).read_text(encoding="utf-8"))["per_query"]
    return {name: {query_id: 100 * value for query_id, value in row.items()} for name, row in values.items()}
