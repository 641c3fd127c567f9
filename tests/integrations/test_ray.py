"""Ray on a real local cluster of two workers: the scores of a run without it, each list once, also when a worker is
killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
psutil = pytest.importorskip("psutil", reason="needs the extra 'train' (psutil)")

from headrank import HeadRankReranker  # noqa: E402
from headrank.commands import main  # noqa: E402
from headrank.integrations import ray_rerank  # noqa: E402
from headrank.passage_store.content import passage_digest  # noqa: E402
from headrank.passage_store.store import PassageStore  # noqa: E402
from headrank.passage_store.upkeep import verify  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402
from tests.unit.test_late_reranker import HEADS, texts  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NUM_LISTS, NUM_PASSAGES, DEPTH = 80, 40, 12


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two cores on loopback, ended with the module."""
    from headrank.integrations.ray_data import connect

    connect(workers=2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "toy"
    folder.mkdir()
    passages = [
        {"docid": f"d{n}", "title": "Fleas" if n % 5 else "", "text": text}
        for n, text in enumerate(texts(NUM_PASSAGES))
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    (folder / "queries.tsv").write_text("".join(f"q{n}\twhat is number {n}\n" for n in range(NUM_LISTS)))
    ranked = [(q, rank, (q * 7 + rank) % NUM_PASSAGES) for q in range(NUM_LISTS) for rank in range(DEPTH + 3)]
    (folder / "run.bm25.txt").write_text(
        "".join(f"q{q} Q0 d{place} {rank + 1} {99 - rank} bm25\n" for q, rank, place in ranked)
    )
    HEADS.save(folder / "heads.json")
    return folder


def rerank(model: Path, source: list[str], output: Path, *more: str, heads: str = "all") -> int:
    flags = ["--model", str(model), "--heads", heads, "--device", "cpu", "--depth", str(DEPTH), "--output", str(output)]
    return main(["rerank", *source, *flags, "--scores", f"{output}.scores", *more])


def scores_of(output: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in Path(f"{output}.scores").read_text().splitlines()]
    assert len({row["query_id"] for row in rows}) == len(rows), "every list once"
    return {row["query_id"]: {key: value for key, value in row.items() if key != "seconds"} for row in rows}


@contextlib.contextmanager
def one_worker_killed(is_time: Callable[[], bool]) -> Iterator[list[int]]:
    """SIGKILL for one of our cluster's workers, once it is time; the pids that were killed."""
    killed, is_over = list[int](), threading.Event()

    def watch() -> None:
        while not (is_over.is_set() or killed):
            if is_time():
                workers = [
                    one
                    for one in psutil.Process().children(recursive=True)
                    if "MapBatches" in "".join(one.cmdline()[:1])
                ]
                if len(workers) == 2:
                    os.kill(workers[0].pid, signal.SIGKILL)
                    killed.append(workers[0].pid)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def test_a_killed_worker_loses_no_list_and_changes_no_score(model: Path, collection: Path, tmp_path: Path) -> None:
    alone, shared, source = tmp_path / "alone.txt", tmp_path / "shared.txt", ["--collection", str(collection)]
    assert rerank(model, source, alone) == 0
    done_at_the_kill = list[int]()

    def some_are_done() -> bool:
        lines = [len(path.read_text().splitlines()) for path in tmp_path.glob("shared.txt.partial-*")]
        done_at_the_kill[:] = lines
        return bool(lines) and lines[0] > 0

    with one_worker_killed(some_are_done) as killed:
        assert rerank(model, source, shared, "--ray", "--ray-workers", "2", "--meta", str(tmp_path / "meta.json")) == 0
    assert len(killed) == 1 and 0 < done_at_the_kill[0] < NUM_LISTS, "one died in the middle"
    assert shared.read_text() == alone.read_text()
    assert scores_of(shared) == scores_of(alone) and len(scores_of(alone)) == NUM_LISTS
    facts = json.loads((tmp_path / "meta.json").read_text())
    assert (facts["engine"], facts["processes"], facts["layers_used"], len(facts["heads"])) == ("ray", 2, 4, 32)
    assert not list(tmp_path.glob("*.partial*"))


def interrupted_after(count: int) -> Callable[..., Iterator]:
    """A progress bar that a person stops."""

    def bar(items: Iterator, total: int | None) -> Iterator:
        yield from itertools.islice(items, count)
        raise KeyboardInterrupt

    return bar


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_requests_that_the_cluster_reads_give_the_files_of_one_process(
    model: Path, collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole, alone, shared = tmp_path / "whole.jsonl", tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert main(["rerank", "--method", "bm25", "--collection", str(collection), "--output", str(whole)]) == 0
    requests = [json.loads(line) for line in whole.read_text().splitlines()]
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        rows = requests[part::3]
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{part}.parquet")
        else:
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rerank(model, ["--requests", str(whole)], alone) == 0
    if kind == "jsonl":
        with monkeypatch.context() as patch:
            patch.setattr(ray_rerank, "progress_of", interrupted_after(5))
            assert rerank(model, ["--requests", str(folder)], shared, "--ray") == 130
        assert not shared.exists() and len(next(tmp_path.glob("shared.jsonl.partial-*")).read_text().splitlines()) == 5
    assert rerank(model, ["--requests", str(folder)], shared, "--ray") == 0
    lists, expected = (sorted(path.read_text().splitlines()) for path in (shared, alone))
    assert lists == expected
    assert scores_of(shared) == scores_of(alone)


def test_bad_requests_are_one_line_and_leave_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "one.jsonl").write_text(
        '{"query": {"text": "what", "qid": "1"}, "candidates": [{"docid": "d", "score": 1, "doc": {}}]}\n'
    )
    assert rerank(model, ["--requests", str(folder)], tmp_path / "out.txt", "--ray") == 2
    assert "one.jsonl: candidate 'd' has no text" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_a_store_filled_by_two_workers_is_that_of_one_process(model: Path, collection: Path, tmp_path: Path) -> None:
    common = [
        "--collection",
        str(collection),
        "--model",
        str(model),
        "--heads",
        str(collection / "heads.json"),
        "--device",
        "cpu",
    ]
    for name, more in (("alone", []), ("shared", ["--ray", "--ray-workers", "2"])):
        assert main(["index", *common, "--store", str(tmp_path / name), *more]) == 0
        assert verify(tmp_path / name) == (NUM_PASSAGES, [])
    alone, shared = PassageStore(tmp_path / "alone"), PassageStore(tmp_path / "shared")
    rows = [json.loads(line) for line in (collection / "corpus.jsonl").read_text().splitlines()]
    digests = [passage_digest((row["title"], row["text"])) for row in rows]
    for one, other in zip(alone.find(digests), shared.find(digests), strict=True):
        assert one is not None and other is not None
        np.testing.assert_array_equal(one.keys_ATD, other.keys_ATD)
    assert main(["index", *common, "--store", str(tmp_path / "shared"), "--ray"]) == 0, "and nothing is computed again"


def test_a_dataset_gets_a_column_of_scores_and_keeps_its_own(model: Path) -> None:
    import ray.data

    from headrank.integrations.ray_data import score_lists

    rows = [
        {"id": 1, "query": "how long do fleas live", "documents": texts(4)},
        {"id": 2, "query": "what is rosin", "documents": []},
        {"id": 3, "query": "what is rosin", "documents": texts(3)},
    ]
    found = score_lists(ray.data.from_items(rows), str(model), heads="all").take_all()
    reranker = HeadRankReranker.from_pretrained(model, "all", device="cpu")
    assert [row["id"] for row in found] == [1, 2, 3]
    for row, given in zip(found, rows, strict=True):
        expected = reranker.score(given["query"], given["documents"]) if given["documents"] else []
        np.testing.assert_allclose(row["scores"], expected, atol=1e-7)


def test_the_example_runs(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["with_ray.py", str(model), "all"])
    runpy.run_path(str(ROOT / "examples" / "with_ray.py"), run_name="__main__")
    assert len(re.findall(r"^[+-]0\.\d{4}  ", capsys.readouterr().out, re.MULTILINE)) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ray-workers", "2"], "give --ray with it"),
        (["--ray", "--ray-workers", "99"], "this Ray cluster has"),
        (["--ray", "--device", "cuda:1"], "it is cpu or cuda"),
        (["--ray", "--requests", "nowhere.parquet"], "no requests there"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    source = [] if "--requests" in flags else ["--collection", str(collection)]
    assert (
        main(
            ["rerank", "--model", str(model), "--heads", "all", "--output", str(tmp_path / "out.txt"), *source, *flags]
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
