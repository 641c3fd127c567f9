"""`headrank evaluate`: what it prints, what it writes beside runs, and what it says to bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.evaluation.scored_lists import read_scores
from headrank.experiments.cells import find_cells
from headrank.formats import write_json, write_jsonl, write_run


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Two judged queries; the first stage has them the wrong way round, run 'ours' right."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "qrels.txt").write_text("1 0 a 2\n1 0 b 0\n2 0 a 1\n")
    write_run(folder / "run.bm25.txt", {"1": [("b", 2.0), ("a", 1.0)], "2": [("b", 2.0), ("a", 1.0)]}, "bm25")
    return folder


def add_run(folder: Path, **lists: list[tuple[str, float]]) -> Path:
    write_run(folder / "run.txt", {query.lstrip("q"): rows for query, rows in lists.items()}, "tag")
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return add_run(tmp_path / "ours", q1=[("a", 0.9), ("b", 0.1)], q2=[("a", 0.8), ("b", 0.2)])


def test_text_shows_means_intervals_and_the_paired_test(
    collection: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["evaluate", "--collection", str(collection), "--first-stage", str(ours), "--measures", "NDCG@10", "MRR"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "nDCG@10", "RR", "queries"]
    assert lines[1].startswith("BM25  63.09 [63.09, 63.09]")
    assert lines[2].startswith("ours  100.00 [100.00, 100.00]")
    assert any(line.split()[:4] == ["nDCG@10", "ours", "BM25", "+36.91"] for line in lines)


def test_json_holds_per_query_values_and_settings(collection: Path, ours: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = [
        "--qrels",
        str(collection / "qrels.txt"),
        f"new={ours / 'run.txt'}",
        "--format",
        "json",
        "--per-query",
        "--output",
        str(output),
    ]
    assert main(["evaluate", *arguments, "--seed", "5"]) == 0
    result = json.loads(output.read_text())
    assert result["runs"]["new"]["per_query"]["nDCG@10"] == {"1": 1.0, "2": 1.0}
    assert result["settings"]["seed"] == 5
    assert result["comparisons"] == []


@pytest.mark.parametrize("style", ["text", "markdown"])
def test_tables_show_per_query_values_too(
    style: str, collection: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "evaluate",
        "--collection",
        str(collection),
        "--first-stage",
        str(ours),
        "--measures",
        "R@1",
        "RR",
        "--format",
        style,
    ]
    assert main([*words, "--per-query"]) == 0
    lines = [line.replace("|", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["query", "BM25", "R@1", "BM25", "RR", "ours", "R@1", "ours", "RR"] in lines
    assert sum(line[:1] == [query_id] and len(line) == 5 for line in lines for query_id in ("1", "2")) == 2


def test_a_gzipped_collection_is_evaluated_like_a_plain_one(
    collection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--collection", str(collection), "--first-stage"]
    main(words)
    plain = capsys.readouterr().out
    for name in ("qrels.txt", "run.bm25.txt"):
        (collection / f"{name}.gz").write_bytes(gzip.compress((collection / name).read_bytes()))
        (collection / name).unlink()
    assert main(words) == 0
    assert capsys.readouterr().out == plain


def test_only_restricts_the_queries(collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = add_run(tmp_path / "half", q1=[("a", 1.0)])
    (tmp_path / "ids.txt").write_text("1\n")
    main(
        [
            "evaluate",
            "--collection",
            str(collection),
            str(half),
            "--format",
            "markdown",
            "--only",
            str(tmp_path / "ids.txt"),
        ]
    )
    assert "| half | 100.00 [100.00, 100.00] | 1 |" in capsys.readouterr().out


def test_missing_queries_and_ties_are_told(collection: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = add_run(tmp_path / "tied", q1=[("a", 1.0), ("b", 1.0)], q9=[("a", 1.0)])
    with caplog.at_level("WARNING"):
        main(["evaluate", "--collection", str(collection), str(tied)])
    told = " ".join(caplog.messages)
    assert "1 judged queries have no results" in told
    assert "1 of its 2 queries are not judged" in told
    assert "1 queries have equal scores" in told


def test_write_metrics_makes_a_cell_with_facts_grades_and_measures(collection: Path, ours: Path) -> None:
    write_json(
        ours / "meta.json",
        {
            "model": "m",
            "method": "headrank",
            "depth": 2,
            "order": "retriever",
            "seconds_per_query": 0.5,
            "heads": [[1, 2]],
        },
    )
    row = {
        "query_id": "1",
        "doc_ids": ["b", "a", "z"],
        "scores": [0.1, 0.9, 0.0],
        "ranks": [1, 2, 3],
        "seconds": 0.5,
        "tokens": 9,
    }
    write_jsonl(ours / "scores.jsonl", [row, row | {"query_id": "unjudged"}])
    assert (
        main(
            ["evaluate", "--collection", str(collection), str(ours), "--write-metrics", "--measures", "nDCG@10", "R@2"]
        )
        == 0
    )
    (cell,) = find_cells(ours)
    assert (cell.model, cell.method, cell.benchmark, cell.condition) == ("m", "headrank", "toy", (2, "retriever"))
    assert cell.value("nDCG@10") == 1.0
    assert cell.per_query("R@2") == {"1": 1.0, "2": 1.0}
    assert cell.metrics["success_rate"] == 1.0
    assert cell.metrics["heads"] == [[1, 2]]
    assert [entry.grades for entry in read_scores(ours / "scores.jsonl")] == [(0, 2, None), None]


def test_write_metrics_names_a_bare_run_after_its_directory(collection: Path, ours: Path) -> None:
    assert main(["evaluate", "--collection", str(collection), "--first-stage", str(ours), "--write-metrics"]) == 0
    assert [cell.method for cell in find_cells(ours)] == ["ours"]
    assert not (collection / "metrics.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt", "--qrels", "QRELS"], "no such file; give a TREC run"),
        (["--qrels", "QRELS"], "no run to evaluate"),
        (["RUN"], "give --qrels FILE or --collection DIR"),
        (["RUN", "--first-stage", "--qrels", "QRELS"], "--first-stage needs --collection"),
        (["RUN", "--qrels", "QRELS", "--measures", "Quality"], "'Quality' is not known"),
        (["RUN", "--qrels", "QRELS", "--measures", "RBP(p=2)"], "RBP(p=2) cannot all be computed here"),
        (["RUN", "--qrels", "QRELS", "--measures", "alpha_nDCG@10"], "alpha_nDCG@10 cannot all be computed here"),
        (
            ["RUN", "--qrels", "QRELS", "--write-metrics", "--output", "/proc/no/where"],
            "/proc/no/where: cannot be written",
        ),
        (["RUN", "--qrels", "QRELS", "--output", "QRELS"], "is read by this very command"),
        (["RUN", "--qrels", "QRELS", "--output", "RUNFILE"], "is read by this very command"),
        (["RUN", "--qrels", "QRELS", "--baseline", "x"], "'x' is not one of the runs"),
        (["RUN", "RUN", "--qrels", "QRELS", "--write-metrics"], "two runs share a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], message: str, collection: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"QRELS": str(collection / "qrels.txt"), "RUN": str(ours), "RUNFILE": str(ours / "run.txt")}
    assert main(["evaluate", *(places.get(word, word) for word in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (ours / "metrics.json").exists()


def test_counts_are_not_made_percentages(collection: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--collection", str(collection), str(ours), "--measures", "NumRet", "--per-query"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["ours", "2.00"]
    assert ["1", "2.00"] in [line.split() for line in lines]


def test_ids_that_nobody_judged_are_told(
    collection: Path, ours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ids.txt").write_text("1\nq1\n")
    main(["evaluate", "--collection", str(collection), "--only", str(tmp_path / "ids.txt"), str(ours)])
    assert "ids.txt: 1 of its 2 query ids are not judged" in caplog.text


def test_equal_names_are_told_apart_by_their_folders(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x", "y"):
        write_run(tmp_path / name / "out.txt", {"1": [("a", 1.0)]}, "t")
    main(
        ["evaluate", "--collection", str(collection), str(tmp_path / "x" / "out.txt"), str(tmp_path / "y" / "out.txt")]
    )
    out = capsys.readouterr().out
    assert "\nout " in out
    assert "\ny/out " in out


def test_dl19_bm25_prints_the_papers_number(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--collection", str(shared_data / "dl19"), "--first-stage", "--resamples", "200"]) == 0
    assert "BM25  50.58 [" in capsys.readouterr().out


def test_a_run_that_measures_swallowed_is_told(
    collection: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--collection", str(collection), "--measures", "RR", str(ours)]) == 2
    assert f"--measures took {ours} for a measure; put the runs before" in capsys.readouterr().err
