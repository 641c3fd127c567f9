"""`headrank view` on a tiny model: the page and the LaTeX table of a real collection's query."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from headrank.commands import main
from headrank.commands.view import choose_query
from headrank.errors import InputError
from headrank.formats import Candidate, Run, write_jsonl, write_run
from headrank.reranking.reranker import HeadRankReranker
from tests.result_cells import make_heads
from tests.tiny_models import make_tiny_model

TEXTS = {
    "a": ("Fleas", "The flea lives for about two to three months & needs <i>warm</i> hosts."),
    "b": ("", "Concrete floors cost between two and six dollars a square foot."),
    "c": ("Rosin", "Rosin makes the bow grip the string of a violin."),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collections") / "toy"
    folder.mkdir()
    (folder / "queries.tsv").write_text("q1\thow long does a flea live\nq2\twhat is rosin for\n")
    write_jsonl(
        folder / "corpus.jsonl",
        ({"docid": doc_id, "title": title, "text": text} for doc_id, (title, text) in TEXTS.items()),
    )
    (folder / "qrels.txt").write_text("q1 0 a 2\nq1 0 b 0\nq2 0 c 1\n")
    write_run(folder / "run.bm25.txt", {query: [("b", 3.0), ("a", 2.0), ("c", 1.0)] for query in ("q1", "q2")}, "bm25")
    return folder


def view(model: Path, collection: Path, output: Path, *more: str, heads: str | None = None) -> int:
    if heads is None:
        heads = str(output.parent / "heads.json")
        make_heads((1, 2), (3, 0), (3, 5), model="tiny", num_layers=4, num_heads=8).save(heads)
    return main(
        [
            "view",
            "--model",
            str(model),
            "--heads",
            heads,
            "--collection",
            str(collection),
            "--output",
            str(output),
            "--device",
            "cpu",
            *more,
        ]
    )


def test_the_page_shows_the_rerankers_own_numbers(model: Path, collection: Path, tmp_path: Path) -> None:
    assert view(model, collection, tmp_path / "view.html", "--query", "q1") == 0
    page = (tmp_path / "view.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    reranker = HeadRankReranker.from_pretrained(model, tmp_path / "heads.json", device="cpu")
    documents = [{"title": title, "text": text} for title, text in (TEXTS[doc_id] for doc_id in ("b", "a", "c"))]
    expected = np.sort(reranker.explain("how long does a flea live", documents).scores)[::-1]
    assert [sum(row["scores"]) for row in data["rows"]] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
    assert "<i>warm</i> hosts" in html.unescape(re.sub(r"<[^>]*>", "", page))
    assert [part["name"] for part in data["parts"]] == ["L1-H2", "L3-H0", "L3-H5"]


def test_word_values_sum_to_the_kept_and_dropped_tokens_of_the_passage(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    view(model, collection, tmp_path / "view.html", "--query", "q1", "--no-calibration")
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "view.html").read_text())[1])
    for row in data["rows"]:  # without calibration nothing is dropped, so words add up to the score
        assert sum(map(sum, row["values"])) == pytest.approx(sum(row["scores"]), rel=0.01)


def test_ranks_of_other_runs_get_columns_and_latex_is_chosen_by_the_name(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "icr.txt", {"q1": [("a", 2.0), ("c", 1.0)]}, "icr")
    assert (
        view(
            model,
            collection,
            tmp_path / "view.tex",
            "--query",
            "q1",
            "--ranks",
            f"ICR={tmp_path / 'icr.txt'}",
            "--top",
            "3",
        )
        == 0
    )
    text = (tmp_path / "view.tex").read_text()
    assert r"\textbf{BM25} & \textbf{ICR} & \textbf{Rel.}" in text
    assert re.search(r"flea.*& 2 & 1 & \\ding\{51\} ", text)
    assert re.search(r"Concrete.*& 1 & -- & -- ", text)


def test_all_heads_are_icr(model: Path, collection: Path, tmp_path: Path) -> None:
    assert view(model, collection, tmp_path / "icr.html", "--query", "q2", "--name", "ICR", heads="all") == 0
    page = (tmp_path / "icr.html").read_text()
    assert "all 32 heads, summed" in page
    assert "<strong>ICR</strong>" in page


def test_the_query_that_moved_most_is_found(collection: Path) -> None:
    def run_of(**orders: str) -> Run:
        return {
            query: [Candidate(doc_id, rank, -float(rank)) for rank, doc_id in enumerate(order, 1)]
            for query, order in orders.items()
        }

    qrels = {"q1": {"a": 2, "b": 0}, "q2": {"c": 1}}
    before = run_of(q1="bac", q2="bac")
    assert choose_query(before, {"new": run_of(q1="bac", q2="cab")}, qrels) == "q2"
    assert choose_query(before, {"new": run_of(q1="abc", q2="bac")}, qrels) == "q1"
    with pytest.raises(InputError, match="needs --ranks NAME=RUN"):
        choose_query(before, {}, qrels)
    with pytest.raises(InputError, match="no judged query in common"):
        choose_query(before, {"new": run_of(q9="abc")}, qrels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "q9"], "'q9' is not in"),
        (["--query", "q1", "--ranks", "icr.txt"], "write NAME=RUN"),
        (["--query", "moved-most"], "needs --ranks"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    model: Path,
    collection: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert view(model, collection, tmp_path / "view.html", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "view.html").exists()


def test_a_page_that_could_not_be_written_is_refused_before_the_model_is_loaded(
    collection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "view",
                "--collection",
                str(collection),
                "--model",
                "nowhere",
                "--query",
                "1",
                "--output",
                "/proc/no/view.html",
            ]
        )
        == 2
    )
    assert "/proc/no/view.html: cannot be written" in capsys.readouterr().err


def test_the_papers_case_studies_come_from_one_command(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    home, icr = tmp_path / "home" / "dl20", tmp_path / "cells" / "dl20" / "icr"
    home.mkdir(parents=True)
    icr.mkdir(parents=True)
    (home / "queries.tsv").write_text("997622\twhere is the show shameless filmed\n1131069\tanother query\n")
    for name in ("corpus.jsonl", "qrels.txt"):
        (home / name).write_text((collection / name).read_text())
    (home / "qrels.txt").write_text("997622 0 a 1\n")
    write_run(home / "run.bm25.txt", {query: [("b", 3.0), ("a", 2.0)] for query in ("997622", "1131069")}, "bm25")
    (home / "benchmark.json").write_text("{}")
    write_run(icr / "run.txt", {"997622": [("a", 2.0), ("b", 1.0)]}, "icr")
    metrics = {"method": "icr", "benchmark": "dl20", "measures": {"nDCG@10": 0.5}, "depth": 40, "model": "tiny"}
    (icr / "metrics.json").write_text(json.dumps(metrics))
    make_heads((1, 2), (3, 0), model="tiny", num_layers=4, num_heads=8).save(tmp_path / "heads.json")
    words = [
        "view",
        "--case-studies",
        "--model",
        str(model),
        "--heads",
        str(tmp_path / "heads.json"),
        "--device",
        "cpu",
    ]
    words += ["--home", str(tmp_path / "home"), "--format", "latex", "--output", str(tmp_path / "cases")]
    assert main([*words, "--cells", str(tmp_path / "cells")]) == 0
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == ["dl20_1131069.tex", "dl20_997622.tex"]
    text = (tmp_path / "cases" / "dl20_997622.tex").read_text()
    assert r"\textbf{BM25} & \textbf{ICR} & \textbf{Rel.}" in text
    assert main([*words[:-4], "--output", str(tmp_path / "none"), "--home", str(tmp_path)]) == 2
    assert "none of their benchmarks is prepared" in capsys.readouterr().err
