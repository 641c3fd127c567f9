"""results/, the tables made from it, and the pages that show them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from headrank.errors import InputError
from headrank.experiments.cell_archive import ArchivedCell, read_archive, write_archive
from headrank.experiments.cells import find_cells
from tests.result_cells import make_matrix

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """docs/results_tables.py: docs/ is no installed package."""
    from docs import results_tables

    return results_tables


def table_with(page: str, head: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of the one table of a page that has ``head`` in its first line."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    (block,) = [block for block in blocks if head in block.splitlines()[0]]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.replace("**", "").splitlines()]
    return {row[0]: row[1:] for row in rows}


def means_on(benchmark: str, folder: str, method: str, measure: str) -> float:
    """The mean over seeds straight from the lines of the file, by another road than the generator's."""
    values = []
    for line in gzip.decompress((RESULTS / "cells.jsonl.gz").read_bytes()).decode().splitlines():
        row = json.loads(line)
        metrics = row["metrics"]
        if (metrics["benchmark"], metrics["method"]) == (benchmark, method) and row["place"].split("/")[1:3] == [
            "top20-retriever",
            folder,
        ]:
            values.append(fmean(metrics["per_query"][measure].values()))
    return 100 * fmean(values)


def test_the_pages_are_current(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_current_is_named_and_left_alone(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table ablations -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", (page,))
    assert tables.main(["--check"]) == 1
    assert "not current: page.md" in capsys.readouterr().err and "\nold\n" in page.read_text()
    assert tables.main([]) == 0 and tables.main(["--check"]) == 0
    assert page.read_text().startswith(
        "before\n<!-- table ablations -->\n| TREC DL 2019"
    ) and page.read_text().endswith("after\n")


COLLECTIONS = [("dl19", "nDCG@10"), ("hotpotqa100", "R@5"), ("nfcorpus", "nDCG@10"), ("noveleval", "nDCG@10")]


def test_the_summary_shows_the_means_of_the_cells() -> None:
    shown = table_with("docs/results.md", "135M model")
    rows = {"BM25": ("first-stage", "bm25"), "HeadRank, trained on 103 queries": ("trained", "headrank+trained")}
    for label, (folder, method) in {**rows, "HeadRank + BM25": ("trained", "headrank+fused")}.items():
        expected = [means_on(benchmark, folder, method, measure) for benchmark, measure in COLLECTIONS]
        assert [float(cell) for cell in shown[label]] == pytest.approx([*expected, fmean(expected)], abs=0.0501)


@pytest.mark.parametrize("page", ["README.md", "docs/teacher_training.md"])
def test_the_table_of_the_embedded_model_shows_the_means_of_its_cells_and_of_the_teacher(page: str) -> None:
    shown = table_with(page, "64 words per passage")
    for label, method in {
        "HeadRank, `embedded`": "headrank+late-fast",
        "HeadRank, untouched model": "headrank+late-untrained",
    }.items():
        expected = [means_on(f"{benchmark}-64", "embedded", method, measure) for benchmark, measure in COLLECTIONS]
        assert [float(cell) for cell in shown[label]] == pytest.approx([*expected, fmean(expected)], abs=0.0501)
    peer = json.loads((RESULTS / "teacher.json").read_text())["per_query"]
    expected = [100 * fmean(peer[benchmark].values()) for benchmark, _ in COLLECTIONS]
    assert [float(cell) for cell in shown["MiniLM-L-12 cross-encoder (the teacher)"][:4]] == pytest.approx(
        expected, abs=0.0501
    )


def test_differences_are_bold_only_where_the_interval_excludes_zero(tables: ModuleType) -> None:
    base = {str(query): float(query) for query in range(40)}
    better = {query: value + 1 + (int(query) % 2) for query, value in base.items()}
    mixed = {query: value + (-1) ** int(query) for query, value in base.items()}
    assert re.fullmatch(r"\*\*\+1\.5 \[1\.\d, 1\.\d]\*\*", tables.difference(better, base))
    assert re.fullmatch(r"\+0\.0 \[-0\.\d, 0\.\d]", tables.difference(mixed, base))
    assert tables.difference(None, base) == "-"


def test_every_training_query_is_held_out_once() -> None:
    one, other = ((RESULTS / "queries" / f"fold-{fold}.qids").read_text().split() for fold in "ab")
    everything = json.loads((RESULTS / "cross_validation.json").read_text())["per_query"]["BM25"]
    assert not set(one) & set(other) and set(one) | set(other) == set(everything)


def test_an_archive_reads_like_the_folder_it_was_made_from(tmp_path: Path) -> None:
    cells = find_cells(make_matrix(tmp_path / "matrix"))
    first = write_archive(cells, tmp_path / "matrix", tmp_path / "one")
    again = find_cells(tmp_path / "one")
    assert [(cell.metrics, cell.scores()) for cell in again] == [(cell.metrics, cell.scores()) for cell in cells]
    assert {cell.place for cell in again if isinstance(cell, ArchivedCell)} == {
        cell.path.relative_to(tmp_path / "matrix").as_posix() for cell in cells
    }
    second = write_archive(again[::-1], tmp_path / "one", tmp_path / "two")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second], (
        "an archive of an archive is the same"
    )


def test_a_broken_line_of_an_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl.gz"
    good = {"place": "a", "metrics": {"method": "icr", "benchmark": "toy", "measures": {"nDCG@10": 0.5}}}
    for bad in ({"metrics": good["metrics"]}, {"place": "b"}, {"place": "b", "metrics": {"method": "icr"}}):
        file.write_bytes(gzip.compress("\n".join(map(json.dumps, (good, bad))).encode()))
        with pytest.raises(InputError, match=r"cells\.jsonl\.gz:2: "):
            read_archive(tmp_path)
    file.write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match="no cell in it"):
        find_cells(tmp_path)


def test_new_cells_replace_those_of_the_same_place(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_matrix(tmp_path / "old", benchmarks=("dl19", "nq"))
    write_archive(find_cells(tmp_path / "old"), tmp_path / "old", tmp_path / "results")
    make_matrix(tmp_path / "new", benchmarks=("nq", "fiqa"), queries=3)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    tables.add(tmp_path / "new")
    kept = {(cell.benchmark, cell.metrics["num_queries"]) for cell in find_cells(tmp_path / "results")}
    assert kept == {("dl19", 12), ("nq", 3), ("fiqa", 3)}
