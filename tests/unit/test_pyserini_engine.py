"""The Pyserini engine against a stand-in: what is missing is said in one line, and results become the same files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from data_tools.retrieve import Bm25Index
from data_tools.sources.pyserini_engine import load_qrels, load_topics, search_pyserini
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Collection, Document, write_jsonl

TEXTS = {
    "d1": {"title": "One", "contents": "first text"},
    "d2": {"passage": "second text"},
    "d3": {"url": "nothing to read"},
}


def make_java(folder: Path, version: str) -> Path:
    """A java that only knows its version."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return folder


class FakeHit:
    def __init__(self, docid: str, score: float) -> None:
        self.docid, self.score = docid, score


class FakeSearcher:
    """Finds every document for every query but 'nothing', with tied scores."""

    def __init__(self, index: str) -> None:
        self.index = index

    @classmethod
    def from_prebuilt_index(cls, name: str) -> FakeSearcher | None:
        if name == "broken":
            raise OSError("connection refused")
        return cls(name) if name == "toy" else None

    def set_bm25(self, k1: float, b: float) -> None:
        assert (k1, b) == (0.9, 0.4)

    def batch_search(self, queries: list[str], qids: list[str], k: int, threads: int) -> dict[str, list[FakeHit]]:
        hits = [FakeHit("d1", 2.0), FakeHit("d2", 2.0)][:k]
        return {qid: [] if text == "nothing" else hits for qid, text in zip(qids, queries, strict=True)}

    def doc(self, doc_id: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(raw=lambda: json.dumps(TEXTS[doc_id]))


@pytest.fixture
def pyserini(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "jdk", "21.0.1")))
    qrels = tmp_path / "toy.qrels"
    qrels.write_text("1 0 d1 2\n1 0 unseen 1\n2 0 d2 0\n")
    search = types.ModuleType("pyserini.search")
    search.get_topics = lambda name: {1: {"title": "first  query"}, 2: {"title": "nothing"}, 3: {"title": "not judged"}}
    search.get_qrels_file = lambda name: str(qrels)
    lucene = types.ModuleType("pyserini.search.lucene")
    lucene.LuceneSearcher = FakeSearcher
    for name, module in {
        "pyserini": types.ModuleType("pyserini"),
        "pyserini.search": search,
        "pyserini.search.lucene": lucene,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return search


def test_a_run_with_texts_comes_back(pyserini: types.ModuleType) -> None:
    result = search_pyserini("toy", {"1": "a query", "2": "nothing"}, 5)
    assert [doc_id for doc_id, _ in result.run["1"]] == ["d1", "d2"]
    assert result.run["1"][0][1] > result.run["1"][1][1]
    assert "2" not in result.run
    assert (result.documents["d1"].title, result.documents["d1"].text) == ("One", "first text")
    assert result.documents["d2"].text == "second text"
    assert search_pyserini("toy", {"1": "a query"}, 5, with_text=False).documents == {}


def test_topics_and_judgements_come_by_name(pyserini: types.ModuleType) -> None:
    assert load_topics("toy") == {"1": "first query", "2": "nothing", "3": "not judged"}
    assert load_qrels("toy")["1"] == {"d1": 2, "unseen": 1}


def test_gzipped_queries_of_a_folder_are_found(pyserini: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "queries.tsv.gz").write_bytes(gzip.compress(b"1\tfirst query\n"))
    words = [
        "retrieve",
        "--engine",
        "pyserini",
        "--index",
        "toy",
        "--collection",
        str(tmp_path),
        "--output",
        str(tmp_path / "run.txt"),
    ]
    assert main(words) == 0
    assert (tmp_path / "run.txt").read_text().startswith("1 Q0 d1 1 ")


def test_the_command_makes_a_whole_collection_and_never_overwrites_one(
    pyserini: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["retrieve", "--engine", "pyserini", "--index", "toy", "--topics", "toy", "--qrels-name", "toy"]
    folder = tmp_path / "made"
    assert main([*arguments, "--collection-output", str(folder)]) == 0
    collection = Collection.open(folder)
    assert collection.queries() == {"1": "first query", "2": "nothing"}
    assert collection.qrels() == {"1": {"d1": 2, "unseen": 1}, "2": {"d2": 0}}
    assert [row.doc_id for row in collection.run()["1"]] == ["d1", "d2"]
    assert set(collection.documents()) == {"d1", "d2"}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(FakeSearcher, "batch_search", lambda *args, **options: pytest.fail("searched for nothing"))
    assert main([*arguments, "--collection-output", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".made")] == []


def test_a_benchmark_is_prepared_from_pyserinis_names(
    pyserini: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeSearcher, "from_prebuilt_index", classmethod(lambda cls, name: cls(name)))
    assert main(["benchmark", "prepare", "dl19", "--from", "pyserini", "--home", str(tmp_path / "home")]) == 0
    assert "Pyserini, index msmarco-v1-passage" in capsys.readouterr().out
    assert set(Collection.open(tmp_path / "home" / "dl19").run()) == {"1"}
    assert main(["benchmark", "prepare", "musique", "--from", "pyserini", "--home", str(tmp_path / "home")]) == 2
    assert "HippoRAG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "words"), [("unknown", "no prebuilt index of that name"), ("broken", "connection refused")]
)
def test_an_index_that_cannot_be_opened_is_named(pyserini: types.ModuleType, index: str, words: str) -> None:
    with pytest.raises(InputError, match=index) as raised:
        search_pyserini(index, {"1": "a query"}, 5)
    assert words in str(raised.value)


def test_a_name_that_pyserini_does_not_know_is_an_error(
    pyserini: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"Topic {name} Not Found")

    monkeypatch.setattr(pyserini, "get_topics", refuse)
    monkeypatch.setattr(pyserini, "get_qrels_file", refuse)
    for load in (load_topics, load_qrels):
        with pytest.raises(InputError, match="'dl99'"):
            load("dl99")


def test_a_missing_java_an_old_java_and_a_missing_package_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no java on the PATH"):
        search_pyserini("toy", {}, 5)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="has no bin/java"):
        search_pyserini("toy", {}, 5)
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", "1.8.0_392")))
    with pytest.raises(InputError, match="is Java 1, Pyserini needs 21"):
        search_pyserini("toy", {}, 5)
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "new", "21.0.2")))
    monkeypatch.setitem(sys.modules, "pyserini", None)
    with pytest.raises(InputError, match="pip install"):
        search_pyserini("toy", {}, 5)


def test_flags_that_pyserini_needs_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieve", "--engine", "pyserini", "--output", "x"]) == 2
    assert "--index" in capsys.readouterr().err
    assert main(["retrieve", "--engine", "pyserini", "--index", "i", "--collection-output", "x"]) == 2
    assert "--qrels-name" in capsys.readouterr().err


@pytest.mark.java
def test_a_real_lucene_index_gives_nearly_the_scores_of_bm25s(tmp_path: Path) -> None:
    """Run in a process of its own: a Java machine lives as long as its process."""
    (tmp_path / "input").mkdir()
    texts = {f"d{n}": " ".join(["flea"] * (n + 1) + ["violin"] * (5 - n)) for n in range(5)}
    write_jsonl(
        tmp_path / "input" / "corpus.jsonl", ({"id": doc_id, "contents": text} for doc_id, text in texts.items())
    )
    flags = [
        "--collection",
        "JsonCollection",
        "--generator",
        "DefaultLuceneDocumentGenerator",
        "--threads",
        "1",
        "--storeRaw",
    ]
    places = ["--input", str(tmp_path / "input"), "--index", str(tmp_path / "index")]
    subprocess.run([sys.executable, "-m", "pyserini.index.lucene", *flags, *places], check=True, capture_output=True)
    code = (
        "import json, sys; from data_tools.sources.pyserini_engine import search_pyserini;"
        "result = search_pyserini(sys.argv[1], {'q': 'fleas'}, 5); print(json.dumps([result.run, "
        "result.documents['d0'].text]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "index")], check=True, capture_output=True, text=True
    )
    run, text = json.loads(answer.stdout.splitlines()[-1])
    expected = Bm25Index(Document(doc_id, "", body) for doc_id, body in texts.items()).search("fleas", 5)
    assert [doc_id for doc_id, _ in run["q"]] == [doc_id for doc_id, _ in expected]
    # Pyserini keeps four digits
    assert [score for _, score in run["q"]] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert text == texts["d0"]
