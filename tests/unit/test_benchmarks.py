"""The registry of benchmarks, and making them from local files with a check against the paper's first-stage numbers."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from data_tools.benchmarks import BENCHMARKS, benchmark_home, find_benchmark, is_ready
from data_tools.prepare_benchmark import check_first_stage, read_material, remove_query_documents
from headrank.commands import main
from headrank.commands.benchmark import find_prepared
from headrank.errors import InputError
from headrank.formats import Collection, write_jsonl
from tests.toy_collections import make_collection

GRADES = {"q1": [0, 2, None], "q2": [1, 0]}  # at ranks 1, 2, ...


def test_the_registry_is_the_papers_fourteen() -> None:
    assert list(BENCHMARKS) == (
        "dl19 dl20 trec-covid arguana trec-news fiqa scidocs nfcorpus nq dbpedia fever hotpotqa 2wiki musique".split()
    )
    for benchmark in BENCHMARKS.values():
        is_multi_hop = benchmark.group == "multi-hop"
        assert (benchmark.retriever, benchmark.depth) == (("colbertv2", 20) if is_multi_hop else ("bm25", 40))
        assert benchmark.measures == (("R@2", "R@5") if is_multi_hop else ("nDCG@10",))
        assert set(benchmark.published_first_stage()) == set(benchmark.measures)
        assert benchmark.licence
        assert benchmark.source or (benchmark.index and benchmark.topics and benchmark.qrels)


def test_names_have_aliases_and_unknown_ones_a_hint() -> None:
    assert find_benchmark("NFC").name == "nfcorpus"
    assert find_benchmark("hotpot").name == "hotpotqa"
    with pytest.raises(InputError, match="did you mean 'musique'"):
        find_benchmark("musik")
    with pytest.raises(InputError, match="the names are dl19"):
        find_benchmark("qqqq")


def test_the_home_is_given_or_in_the_environment_or_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADRANK_BENCHMARKS", raising=False)
    assert benchmark_home() == tmp_path / "cache" / "benchmarks"
    monkeypatch.setenv("HEADRANK_BENCHMARKS", str(tmp_path / "named"))
    assert benchmark_home() == tmp_path / "named"
    assert benchmark_home(tmp_path / "given") == tmp_path / "given"


def prepare(*arguments: str, home: Path) -> int:
    return main(["benchmark", "prepare", *arguments, "--home", str(home)])


def test_a_collection_becomes_a_benchmark_with_its_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_collection(tmp_path / "source", GRADES)
    assert prepare("dl19", "--from", str(tmp_path / "source"), home=tmp_path) == 0
    output = capsys.readouterr().out
    assert "the paper's bm25: 50.58" in output
    assert "not the paper's candidates" in output
    assert "shortest list has 2" in output
    facts = json.loads((tmp_path / "dl19" / "benchmark.json").read_text())
    # q1: gain 2 at rank 2 of an ideal at rank 1, q2 is ideal
    assert facts["first_stage"]["nDCG@10"]["over_all_queries"] == pytest.approx(100 * (0.6309298 + 1) / 2, abs=1e-3)
    assert facts["first_stage"]["nDCG@10"]["equals_published"] is False
    assert is_ready(BENCHMARKS["dl19"], tmp_path)
    made, source = Collection.open(tmp_path / "dl19"), Collection.open(tmp_path / "source")
    assert made.queries() == source.queries()
    assert {q: [row.doc_id for row in rows] for q, rows in made.run().items()} == {
        q: [row.doc_id for row in rows] for q, rows in source.run().items()
    }
    assert {q: grades for q, grades in source.qrels().items() if q in GRADES} == made.qrels()


def test_strict_fails_on_other_numbers_and_nothing_is_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(make_collection(tmp_path / "source", GRADES).queries_path.parent)
    assert prepare("dl19", "--from", source, "--strict", home=tmp_path) == 1
    assert prepare("dl19", "--from", source, home=tmp_path) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert prepare("dl19", "--from", source, "--overwrite", home=tmp_path) == 0


def test_a_folder_of_the_user_is_never_replaced(tmp_path: Path) -> None:
    source = str(make_collection(tmp_path / "source", GRADES).queries_path.parent)
    (tmp_path / "dl19").mkdir()
    (tmp_path / "dl19" / "thesis.txt").write_text("precious")
    assert prepare("dl19", "--from", source, "--overwrite", home=tmp_path) == 2
    assert (tmp_path / "dl19" / "thesis.txt").read_text() == "precious"


def test_a_collection_without_a_run_is_searched_with_bm25s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_collection(tmp_path / "source", GRADES)
    (tmp_path / "source" / "run.bm25.txt").unlink()
    (tmp_path / "source" / "queries.tsv").write_text("q1\ttext q1\nq2\tnothing alike\n")
    assert prepare("dl20", "--from", str(tmp_path / "source"), home=tmp_path) == 0
    output = capsys.readouterr().out
    assert "bm25s over the whole corpus" in output
    assert "1 queries have no candidates" in output
    assert prepare("musique", "--from", str(tmp_path / "source"), home=tmp_path) == 2
    assert "run.colbertv2.txt is missing" in capsys.readouterr().err


def test_the_papers_own_retriever_is_preferred(tmp_path: Path) -> None:
    make_collection(tmp_path / "source", GRADES)
    shutil.copy(tmp_path / "source" / "run.bm25.txt", tmp_path / "source" / "run.colbertv2.txt")
    assert read_material(BENCHMARKS["2wiki"], str(tmp_path / "source")).origin == "run.colbertv2.txt"
    assert read_material(BENCHMARKS["dl19"], str(tmp_path / "source")).origin == "run.bm25.txt"


def test_candidates_of_bm25_are_never_called_colbertv2s(tmp_path: Path) -> None:
    make_collection(tmp_path / "source", GRADES)
    with pytest.raises(InputError, match=r"run\.colbertv2\.txt is missing; MuSiQue needs candidates of colbertv2"):
        read_material(BENCHMARKS["musique"], str(tmp_path / "source"))
    shutil.copy(tmp_path / "source" / "run.bm25.txt", tmp_path / "source" / "run.colbertv2.txt")
    prepare("musique", "--from", str(tmp_path / "source"), home=tmp_path)
    assert read_material(BENCHMARKS["musique"], str(tmp_path / "musique")).origin == "run.bm25.txt", (
        "prepared before, and says whose they are"
    )


def test_an_unpacked_beir_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "fiqa"
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(
        folder / "queries.jsonl",
        [{"_id": "1", "text": "cost of\nconcrete"}, {"_id": "2", "text": "of the training split"}],
    )
    write_jsonl(
        folder / "corpus.jsonl",
        [{"_id": "d1", "title": "", "text": "concrete floors"}, {"_id": "d2", "title": "", "text": "a violin"}],
    )
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t1\n")
    material = read_material(BENCHMARKS["fiqa"], str(folder))
    assert material.queries == {"1": "cost of concrete"}
    assert material.qrels == {"1": {"d1": 1}}
    assert [doc_id for doc_id, _ in material.run["1"]] == ["d1"]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\tgood\n")
    with pytest.raises(InputError, match=r"test\.tsv:2: score 'good'"):
        read_material(BENCHMARKS["fiqa"], str(folder))


def test_a_beir_folder_may_be_gzipped_and_its_wrong_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "queries.jsonl.gz").write_bytes(gzip.compress(b'{"_id": 7, "text": "concrete"}\n'))
    (tmp_path / "corpus.jsonl.gz").write_bytes(
        gzip.compress(b'{"_id": "d1", "title": "", "text": "concrete floors"}\n')
    )
    qrels = tmp_path / "qrels" / "test.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\r\n7\td1\t1\r\n7\td1\t1\r\n")
    assert read_material(BENCHMARKS["fiqa"], str(tmp_path)).run["7"][0][0] == "d1"
    for line, message in (
        ("7\td1\t2", ":3: .* two grades, 1 and 2"),
        ("7\td1\t1_0", ":3: score '1_0'"),
        ("7 d 1 1", ":3: expected"),
    ):
        qrels.write_text(f"query-id\tcorpus-id\tscore\n7\td1\t1\n{line}\n")
        with pytest.raises(InputError, match=r"test\.tsv" + message):
            read_material(BENCHMARKS["fiqa"], str(tmp_path))
    (tmp_path / "queries.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match=r"queries\.jsonl\.gz: no queries"):
        read_material(BENCHMARKS["fiqa"], str(tmp_path))


def test_a_run_of_other_queries_is_refused(tmp_path: Path) -> None:
    make_collection(tmp_path / "source", GRADES)
    (tmp_path / "source" / "run.bm25.txt").write_text("other Q0 d 1 1.0 x\n")
    with pytest.raises(InputError, match=r"run\.bm25\.txt: no query of the run is judged"):
        read_material(BENCHMARKS["dl19"], str(tmp_path / "source"))


def test_the_querys_own_document_can_be_left_out(tmp_path: Path) -> None:
    run = {"q1": [("q1", 3.0), ("d", 2.0)], "q2": [("d", 1.0)]}
    assert remove_query_documents(run) == ({"q1": [("d", 2.0)], "q2": [("d", 1.0)]}, 1)


def test_a_prepared_benchmark_is_found_by_the_matrix_with_the_papers_average(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="benchmark prepare dl19"):
        find_prepared("dl19", str(tmp_path))
    make_collection(tmp_path / "source", GRADES)
    assert prepare("dl19", "--from", str(tmp_path / "source"), home=tmp_path) == 0
    found = find_prepared("trec-dl-2019", str(tmp_path))
    assert (found.name, found.collection, found.depth, found.measures, found.missing) == (
        "dl19",
        tmp_path / "dl19",
        40,
        ("nDCG@10",),
        "skip",
    )


def test_all_means_every_prepared_benchmark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["benchmark", "run", "--benchmarks", "all", "--methods", "bm25", "colbertv2", "--home", str(tmp_path)]
    words += ["--output", str(tmp_path / "cells")]
    assert main(words) == 2
    assert "--benchmarks all: none is prepared" in capsys.readouterr().err
    make_collection(tmp_path / "source", GRADES)
    shutil.copy(tmp_path / "source" / "run.bm25.txt", tmp_path / "source" / "run.colbertv2.txt")
    for name in ("nfcorpus", "dl19", "musique"):
        prepare(name, "--from", str(tmp_path / "source"), home=tmp_path)
    assert main(words) == 0
    assert sorted(
        str(path.parent.relative_to(tmp_path / "cells")) for path in (tmp_path / "cells").rglob("metrics.json")
    ) == [
        "dl19/top40-retriever/first-stage/bm25",
        "musique/top20-retriever/first-stage/colbertv2",
        "nfcorpus/top40-retriever/first-stage/bm25",
    ]
    assert "not prepared and left out: dl20, trec-covid" in caplog.text + capsys.readouterr().err


def test_the_list_shows_what_is_ready_and_everything_about_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_collection(tmp_path / "source", GRADES)
    prepare("dl19", "--from", str(tmp_path / "source"), home=tmp_path)
    capsys.readouterr()
    assert main(["benchmark", "list", "--home", str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:15]}
    assert set(rows) == set(BENCHMARKS)
    assert rows["dl19"][-5:] == ["50.58", "59.93", "61.32", "64.33", "yes"]
    assert rows["musique"][-5:] == ["49.52", "51.02", "54.47", "55.10", "-"]
    assert main(["benchmark", "list", "arguana", "--home", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "beir-v1.0.0-arguana.flat" in text
    assert "itself a document" in text
    assert "Table 1" in text


@pytest.mark.parametrize(("name", "folder"), [("dl19", "dl19"), ("nfcorpus", "nfcorpus")])
def test_real_candidates_give_the_papers_bm25_number(shared_data: Path, name: str, folder: str) -> None:
    checks = check_first_stage(BENCHMARKS[name], read_material(BENCHMARKS[name], str(shared_data / folder)))
    assert all(check.is_equal for check in checks)
