"""The tables of README.md and docs/results.md against the result files in this repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
COLLECTIONS = {"TREC DL 2019": ("dl19", "nDCG@10"), "HotpotQA": ("hotpotqa100", "R@5"), "NFCorpus": ("nfcorpus", "nDCG@10")}
COLLECTIONS |= {"NovelEval": ("noveleval", "nDCG@10")}


def tables_of(page: str) -> list[list[list[str]]]:
    """Every table of a page: its head and its rows, as cells without stress marks."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    tables = [[line.removeprefix("|").removesuffix("|").replace("**", "").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in (head, *rows)] for head, _, *rows in tables]


def table_with(page: str, *heads: str) -> list[list[str]]:
    """The rows of the one table that has all these cells in its head."""
    (found,) = [table[1:] for table in tables_of(page) if set(heads) <= set(table[0])]
    return found


def measured(collection: str, model: str, method: str, measure: str, depth: int = 20) -> list[float]:
    """The values of a method's cells, one a seed."""
    folder = RESULTS / "matrix" / collection / f"top{depth}-retriever" / model
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{method}*/metrics.json"))]
    return [100 * cell["measures"][measure] for cell in cells if cell["method"] == method]


@pytest.mark.parametrize("title", COLLECTIONS)
def test_the_readmes_table_is_that_of_the_cells(title: str) -> None:
    collection, measure = COLLECTIONS[title]
    (row,) = [row for row in table_with("README.md", "that against BM25") if row[0].startswith(title)]
    free = [measured(collection, "base", method, measure) for method in ("icr", "core", "qr", "niah", "headrank+sequential-untrained")]
    columns = [
        measured(collection, "first-stage", "bm25", measure),
        max(free),
        measured(collection, "base", "headrank+untrained", measure),
        measured(collection, "trained", "headrank+trained", measure),
        measured(collection, "trained", "headrank+fused", measure),
    ]
    assert [len(values) for values in columns] == [1, 1, 1, 3, 3]
    assert [float(cell) for cell in row[1:6]] == pytest.approx([fmean(values) for values in columns], abs=0.0501)


SEEDS = {"HeadRank, seeds 1 2 3: mean": ("trained", "headrank+trained"), "HeadRank, re-selected": ("trained", "headrank")}
SEEDS |= {"HeadRank + BM25, seeds 1 2 3: mean": ("trained", "headrank+fused")}
RANDOM = {"HeadRank, random pairs instead of ALPS": ("random-pairs", "headrank+trained")}


@pytest.mark.parametrize(("depth", "label"), [*((20, label) for label in SEEDS | RANDOM), *((40, label) for label in SEEDS)])
def test_every_seed_on_the_results_page_is_that_of_its_cell(depth: int, label: str) -> None:
    titles = list(COLLECTIONS) if depth == 20 else ["TREC DL 2019", "NFCorpus"]
    tables = [table for table in tables_of("docs/results.md") if [cell.partition(",")[0] for cell in table[0][1:]] == titles]
    (row,) = [row for table in tables if "against" not in table[0][0] for row in table if row[0] == label]
    for title, cell in zip(titles, row[1:], strict=True):
        values = measured(COLLECTIONS[title][0], *(SEEDS | RANDOM)[label], COLLECTIONS[title][1], depth)
        assert [float(number) for number in re.split("[,:] ", cell)] == pytest.approx([*values, fmean(values)], abs=0.0501)


ABLATIONS = {"untrained, the same heads": "untrained", "full": "full", "SFT (RankNet)": "sft", "all heads": "all-heads"}
ABLATIONS |= {"without the entropy gate": "no-gate", "without ALPS (random pairs)": "no-alps", "without Omega": "no-omega"}
ABLATIONS |= {"without the proximal penalty": "no-prox"}
HELD_OUT = {"BM25": "BM25", "HeadRank's heads, untrained": "untrained", "HeadRank (ALPS)": "ALPS", "random pairs": "random pairs"}


@pytest.mark.parametrize(
    ("file", "head", "names", "queries"),
    [("ablations.json", "against full", ABLATIONS, 43), ("cross_validation.json", "103 held-out training queries", HELD_OUT, 103)],
)
def test_means_over_queries_are_those_of_the_values_kept(file: str, head: str, names: dict[str, str], queries: int) -> None:
    kept = json.loads((RESULTS / file).read_text())["per_query"]
    shown = {row[0]: float(row[1]) for row in table_with("docs/results.md", head, "NDCG@10")}
    assert {len(values) for values in kept.values()} == {queries}
    assert shown == pytest.approx({label: 100 * fmean(kept[name].values()) for label, name in names.items()}, abs=0.0501)


def test_the_folds_part_the_training_queries() -> None:
    one, other = ((RESULTS / f"fold-{fold}.qids").read_text().split() for fold in "ab")
    everything = json.loads((RESULTS / "cross_validation.json").read_text())["per_query"]["BM25"]
    assert not set(one) & set(other) and set(one) | set(other) == set(everything)
