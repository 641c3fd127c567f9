"""`headrank index` as a command: filled, looked after, killed and gone on with, read by rerank, benchmark and
doctor.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from headrank.commands import main
from headrank.formats import read_run
from headrank.passage_store.content import passage_digest
from headrank.passage_store.segment import KEYS, RECORDS, SEAL
from headrank.passage_store.store import PassageStore, segment_folders
from headrank.passage_store.upkeep import verify
from tests.tiny_models import make_tiny_model
from tests.unit.test_late_reranker import HEADS, QUERIES, texts

ROOT = Path(__file__).resolve().parents[2]
NUM_PASSAGES = 30
OF_A_LISTS_DEVIATION = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    write_corpus(folder / "corpus.jsonl", texts(NUM_PASSAGES))
    (folder / "queries.tsv").write_text("".join(f"q{number}\t{query}\n" for number, query in enumerate(QUERIES)))
    run = [
        f"q{number} Q0 d{place} {place + 1} {99 - place} bm25\n" for number in range(3) for place in range(NUM_PASSAGES)
    ]
    (folder / "run.bm25.txt").write_text("".join(run))
    (folder / "qrels.txt").write_text("q0 0 d1 1\nq1 0 d2 1\nq2 0 d3 1\n")
    HEADS.save(folder / "heads.json")
    return folder


def write_corpus(path: Path, some: list[str]) -> None:
    path.write_text(
        "".join(json.dumps({"docid": f"d{n}", "title": "", "text": text}) + "\n" for n, text in enumerate(some))
    )


def of(model: Path, collection: Path) -> list[str]:
    return [
        "--model",
        str(model),
        "--heads",
        str(collection / "heads.json"),
        "--collection",
        str(collection),
        "--device",
        "cpu",
    ]


def index(model: Path, collection: Path, store: Path, *more: str) -> int:
    return main(["index", *of(model, collection), "--store", str(store), *more])


def scores(run: Path) -> Mapping[str, dict[str, float]]:
    return {query: {row.doc_id: row.score for row in rows} for query, rows in read_run(run).items()}


def test_a_store_is_filled_described_verified_and_not_filled_again(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    assert index(model, collection, store) == 0
    assert (
        "30 passages to add (0 are there), about" in caplog.text
        and "bytes per token" in caplog.text
        and "minutes" in caplog.text
    )
    assert "30 passages added, 0 were there" in capsys.readouterr().out
    assert index(model, collection, store) == 0
    assert "0 passages added, 30 were there" in capsys.readouterr().out
    assert main(["index", "--store", str(store), "--info"]) == 0
    said = capsys.readouterr().out
    assert all(
        part in said
        for part in (
            "4: 0:0, 1:3, 2:0, 2:1",
            "int8, pool 1, 32 bytes per token",
            "saturated  0 numbers",
            "branch_position 64",
        )
    )
    assert main(["index", "--store", str(store), "--verify"]) == 0
    assert "30 passages, all whole" in capsys.readouterr().out


def test_rerank_and_benchmark_with_a_store_give_the_scores_without_one(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    """An fp32 store that holds a part of the candidates; then the others are added."""
    part, store = tmp_path / "part.jsonl", tmp_path / "store"
    write_corpus(part, texts(NUM_PASSAGES)[::2])
    model_of = ["--model", str(model), "--heads", str(collection / "heads.json"), "--device", "cpu"]
    assert main(["index", *model_of, "--corpus", str(part), "--store", str(store), "--dtype", "fp32"]) == 0
    reranking = ["rerank", *of(model, collection), "--dtype", "float32"]
    assert main([*reranking, "--output", str(tmp_path / "plain.txt")]) == 0
    assert (
        main([*reranking, "--output", str(tmp_path / "mixed.txt"), "--store", str(store), "--key-cache-mb", "0"]) == 0
    )
    assert len(PassageStore(store)) == NUM_PASSAGES // 2
    assert main([*reranking, "--output", str(tmp_path / "added.txt"), "--store", str(store), "--store-add"]) == 0
    assert len(PassageStore(store)) == NUM_PASSAGES and verify(store)[1] == []
    matrix = ["benchmark", "run", "--models", str(model), "--methods", "headrank", "--benchmarks", str(collection)]
    matrix += [
        "--heads",
        str(collection / "heads.json"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--store",
        str(store),
    ]
    assert main([*matrix, "--output", str(tmp_path / "cells")]) == 0
    plain = scores(tmp_path / "plain.txt")
    for run in (tmp_path / "mixed.txt", tmp_path / "added.txt", next((tmp_path / "cells").rglob("run.txt"))):
        for query, found in scores(run).items():
            bound = OF_A_LISTS_DEVIATION * float(np.std(list(plain[query].values())))
            assert max(abs(found[doc] - plain[query][doc]) for doc in plain[query]) <= bound, run


def test_only_the_candidates_of_a_run_are_indexed_if_asked_for(model: Path, collection: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run = [
        f"q{number} Q0 d{5 * number + place} {place + 1} {9 - place} bm25\n"
        for number in range(3)
        for place in range(6)
    ]
    (collection / "run.bm25.txt").write_text("".join(run))
    (tmp_path / "only").write_text("q0\nq2\n")
    assert index(model, collection, store, "--depth", "3", "--only", str(tmp_path / "only")) == 0
    found = PassageStore(store).find([passage_digest(("", text)) for text in texts(NUM_PASSAGES)])
    assert [number for number, entry in enumerate(found) if entry] == [0, 1, 2, 10, 11, 12]


KILLED = """
import sys
from headrank.passage_store import indexing
indexing._AT_A_TIME = 4  # many commits in a short time
from headrank.commands import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_index_run_killed_by_sigkill_keeps_what_it_committed_and_goes_on(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    """Killed several times, at the next commit each time, then run to its end: the same keys as of a run that nobody
    disturbed.
    """
    passages = texts(2400, longest=40)
    write_corpus(collection / "corpus.jsonl", passages)
    store, whole = tmp_path / "store", tmp_path / "whole"
    command = [sys.executable, "-c", KILLED, "index", *of(model, collection), "--store", str(store), "--dtype", "fp32"]
    committed = 0
    for _ in range(2):
        with subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ) as process:
            while process.poll() is None and records_in(store) <= committed:
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "it was at work"
        before, committed = committed, len(PassageStore(store))
        assert before < committed < len(passages) and verify(store)[1] == []
        assert not (segment_folders(store)[-1] / SEAL).exists(), "nobody sealed what it was writing"
    assert index(model, collection, store, "--dtype", "fp32") == 0
    assert index(model, collection, whole, "--dtype", "fp32") == 0
    assert verify(store) == (len(passages), [])
    digests = [passage_digest(("", text)) for text in passages]
    for one, other in zip(PassageStore(store).find(digests), PassageStore(whole).find(digests), strict=True):
        assert one is not None and other is not None and np.array_equal(one.keys_ATD, other.keys_ATD)


def records_in(store: Path) -> int:
    """Committed passages, looked up as a reader would; 0 before there is a store."""
    return len(PassageStore(store)) if (store / "store.json").is_file() else 0


def test_a_smaller_store_is_made_from_a_larger_one_without_computing(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small, direct = (tmp_path / name for name in ("large", "small", "direct"))
    assert index(model, collection, large, "--pairs", "all", "--dtype", "fp32") == 0
    converting = ["index", "--store", str(small), "--from", str(large), *of(model, collection)[:4], "--pool", "2"]
    assert main(converting) == 0
    assert "30 passages converted, 0 were there" in capsys.readouterr().out
    assert main(converting) == 0 and "0 passages converted, 30 were there" in capsys.readouterr().out
    assert index(model, collection, direct, "--pool", "2", "--compute-dtype", "float32") == 0
    one, other = PassageStore(small), PassageStore(direct)
    assert (one.header.pairs, one.header.dtype, one.header.pool) == (other.header.pairs, "int8", 2) and verify(
        small
    ) == (NUM_PASSAGES, [])
    assert main(["rerank", *of(model, collection), "--store", str(small), "--output", str(tmp_path / "small.txt")]) == 0
    assert (
        main(["rerank", *of(model, collection), "--store", str(direct), "--output", str(tmp_path / "direct.txt")]) == 0
    )
    for query, found in scores(tmp_path / "small.txt").items():  # scales were measured on other samples
        expected = scores(tmp_path / "direct.txt")[query]
        assert np.corrcoef([found[doc] for doc in expected], list(expected.values()))[0, 1] > 0.999
    for more, said in (
        (["--store", str(small), "--from", str(large)], "made with other pairs"),
        (["--store", str(tmp_path / "x"), "--from", str(small)], "only keys in bf16 or fp32"),
        (["--store", str(small), "--from", str(large), "--corpus", "c"], "leave out --collection"),
    ):
        assert main(["index", *more]) == 2 and said in capsys.readouterr().err


def test_damage_is_reported_with_exit_code_1_and_pruned(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert index(model, collection, store) == 0
    key_file = segment_folders(store)[0] / KEYS
    raw = bytearray(key_file.read_bytes())
    raw[len(raw) // 2] ^= 1
    key_file.write_bytes(raw)
    assert main(["index", "--store", str(store), "--verify"]) == 1
    assert "its record or keys are damaged" in capsys.readouterr().out
    assert main(["index", "--store", str(store), "--prune"]) == 0
    assert "29 passages kept, 1 dropped" in capsys.readouterr().out
    assert index(model, collection, store) == 0, "the damaged one is computed again"
    assert verify(store) == (NUM_PASSAGES, [])
    write_corpus(collection / "corpus.jsonl", texts(NUM_PASSAGES)[:10])
    assert main(["index", "--store", str(store), "--prune", "--collection", str(collection)]) == 0
    assert "10 passages kept, 20 dropped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "nothing to index; give --collection"),
        (["--info", "--verify"], "three jobs; give one"),
        (["--info"], "no passage store there"),
        (["--prune"], "no passage store there"),
        (["--collection", "nowhere"], "no corpus.jsonl"),
        (["--corpus", "c.jsonl", "--depth", "5"], "--depth takes the candidates"),
        (["--collection", "c", "--only", "ids"], "--only goes with it"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", "--store", str(tmp_path / "store"), *more]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "store").exists()


def test_a_corpus_with_a_damaged_line_leaves_the_place_as_it_was(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(collection / "corpus.jsonl", "a") as stream:
        stream.write('{"docid": "d99", "text":\n')
    there = tmp_path / "there"
    there.mkdir()
    (there / "note.txt").write_text("mine")
    for store in (tmp_path / "store", there):
        assert index(model, collection, store) == 2
        assert f"corpus.jsonl:{NUM_PASSAGES + 1}: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "store").exists() and [path.name for path in there.iterdir()] == ["note.txt"]
    file = tmp_path / "a file"
    file.write_text("")
    assert index(model, collection, file) == 2 and "is a file; a store is a folder" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert index(model, collection, tmp_path / "store") == 2
    assert "MB are needed" in capsys.readouterr().err
    assert not (tmp_path / "store" / "store.json").exists()


def test_the_doctor_looks_at_a_store(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert index(model, collection, store) == 0
    asking = [
        "doctor",
        "--part",
        "environment",
        "--model",
        str(model),
        "--heads",
        str(collection / "heads.json"),
        "--device",
        "cpu",
    ]
    assert main([*asking, "--store", str(store)]) == 0
    said = capsys.readouterr().out
    assert "30 passages in int8" in said and "fits the model and its heads" in said
    other = make_tiny_model(tmp_path / "other", "llama", seed=3)
    asking[asking.index(str(model))] = str(other)
    assert main([*asking, "--store", str(store)]) == 1
    assert "this store cannot serve this reranker" in capsys.readouterr().out
    os.truncate(segment_folders(store)[0] / RECORDS, 64)
    assert main([*asking, "--store", str(store)]) == 1
    assert "sealed with 30 records, found 1" in capsys.readouterr().out
