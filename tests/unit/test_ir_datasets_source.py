"""Benchmarks from ir_datasets: the real package with a tiny data set made here, and one line when it is not
installed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_tools.benchmarks import BENCHMARKS
from data_tools.sources.ir_datasets_source import iterate_dataset, read_dataset_qrels, read_dataset_queries
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Collection

TINY = "headrank-test"


def prepare(*arguments: str, home: Path) -> int:
    return main(["benchmark", "prepare", *arguments, "--home", str(home)])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of a data set that the real package reads from three files."""
    monkeypatch.setenv("IR_DATASETS_HOME", str(tmp_path / "irds"))
    package = pytest.importorskip("ir_datasets", reason="needs the extra 'datasets' (ir_datasets)")
    (tmp_path / "docs.tsv").write_text("d1\tconcrete floors crack\nd2\ta violin\nd3\tconcrete is cheap\n")
    (tmp_path / "queries.tsv").write_text("q1\tcost of  concrete\nq2\tviolin strings\nq3\tnobody judged this\n")
    (tmp_path / "qrels.txt").write_text("q1 0 d3 2\nq1 0 d1 1\nq2 0 d2 1\n")
    dataset = package.create_dataset(
        docs_tsv=str(tmp_path / "docs.tsv"),
        queries_tsv=str(tmp_path / "queries.tsv"),
        qrels_trec=str(tmp_path / "qrels.txt"),
    )
    package.registry.register(TINY, dataset)
    yield TINY
    del package.registry._registered[TINY]


def test_a_data_set_becomes_a_benchmark(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("fiqa", "--from", f"ir_datasets:{tiny}", home=tmp_path / "home") == 0
    assert f"candidates from bm25s over ir_datasets {tiny}" in capsys.readouterr().out
    made = Collection.open(tmp_path / "home" / "fiqa")
    assert made.queries() == {"q1": "cost of concrete", "q2": "violin strings"}
    assert made.qrels() == {"q1": {"d3": 2, "d1": 1}, "q2": {"d2": 1}}
    assert {query_id: [row.doc_id for row in rows] for query_id, rows in made.run().items()} == {
        "q1": ["d3", "d1"],
        "q2": ["d2"],
    }
    assert made.documents()["d3"].text == "concrete is cheap"


def test_the_registered_id_is_used_and_unknown_ones_are_one_line(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BENCHMARKS, "nq", dataclasses.replace(BENCHMARKS["nq"], ir_datasets=tiny))
    assert prepare("nq", "--from", "ir_datasets", home=tmp_path / "home") == 0
    capsys.readouterr()
    assert prepare("fiqa", "--from", "ir_datasets:beir/fica", home=tmp_path / "home") == 2
    assert "there is no data set 'beir/fica'" in capsys.readouterr().err
    assert prepare("fiqa", "--from", "ir_datasets:beir/fiqa", home=tmp_path / "home") == 2
    assert "beir/fiqa has no qrels; name one of its subsets" in capsys.readouterr().err
    assert not (tmp_path / "home" / "fiqa").exists()


def test_every_id_of_the_registry_is_one_of_the_package(tiny: str) -> None:
    package = pytest.importorskip("ir_datasets")
    for benchmark in BENCHMARKS.values():
        if benchmark.ir_datasets is not None:
            dataset = package.load(benchmark.ir_datasets)
            assert dataset.has_docs()
            assert dataset.has_qrels()
            assert dataset.metadata()["queries"]["count"] == benchmark.num_queries


def test_a_missing_package_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    assert prepare("fiqa", "--from", "ir_datasets", home=tmp_path) == 2
    message = capsys.readouterr().err
    assert "the package 'ir_datasets' is not installed; pip install ir_datasets" in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_ir_datasets_does_not_have_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("trec-news", "--from", "ir_datasets", home=tmp_path) == 2
    assert "trec.nist.gov" in capsys.readouterr().err
    assert prepare("musique", "--from", "ir_datasets", home=tmp_path) == 2
    assert "HippoRAG" in capsys.readouterr().err
    assert prepare("musique", "--from", "ir_datasets:beir/nq", home=tmp_path) == 2
    assert "needs candidates of colbertv2" in capsys.readouterr().err


def rows(**columns: Any) -> SimpleNamespace:
    """A data set of rows as ir_datasets gives them."""
    return SimpleNamespace(**{f"{name}_iter": lambda listed=listed: iter(listed) for name, listed in columns.items()})


def test_documents_without_a_plain_text_give_their_default_text() -> None:
    with_title = SimpleNamespace(doc_id="d1", title="T", text="body")
    structured = SimpleNamespace(doc_id="d2", title="T", default_text=lambda: "T and all fields")
    documents = list(iterate_dataset(rows(docs=[with_title, structured]), "toy"))
    assert [(document.title, document.text) for document in documents] == [("T", "body"), ("", "T and all fields")]


def test_what_trec_files_cannot_hold_is_refused() -> None:
    spaced = SimpleNamespace(doc_id="d 1", text="x")
    with pytest.raises(InputError, match="id 'd 1' has a space"):
        list(iterate_dataset(rows(docs=[spaced]), "toy"))
    empty = SimpleNamespace(query_id="q", default_text=lambda: " ")
    with pytest.raises(InputError, match="query 'q' is empty"):
        read_dataset_queries(rows(queries=[empty]), "toy")
    graded = [SimpleNamespace(query_id="q", doc_id="d", relevance=grade) for grade in (1, 1, 2)]
    with pytest.raises(InputError, match="two grades"):
        read_dataset_qrels(rows(qrels=graded), "toy")
    assert read_dataset_qrels(rows(qrels=graded[:2]), "toy") == {"q": {"d": 1}}


def test_a_failed_download_is_one_line() -> None:
    def broken() -> Iterator[Any]:
        raise ConnectionError("no route to host\nand more")
        yield

    with pytest.raises(InputError, match=r"^ir_datasets toy: could not be read \(no route to host\)"):
        read_dataset_qrels(SimpleNamespace(qrels_iter=broken), "toy")
