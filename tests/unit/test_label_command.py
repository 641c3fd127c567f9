"""headrank label: resumable, never doubled, refuses what others made, and says beside the run how it was made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.labels.labelling import LabelSettings, label_collection
from data_tools.teachers.teacher import QueryList
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Collection, read_run
from tests.toy_collections import make_collection

ROOT = Path(__file__).resolve().parents[2]


class RerankServer(ThreadingHTTPServer):
    """A Cohere-compatible server: a passage scores the last number in it. ``script`` holds statuses to answer with
    first.
    """

    script: list[int]
    asked: list[tuple[dict[str, str], dict[str, Any]]]
    answers_left: int = 1_000_000  # afterwards requests hang until ``gone`` is set
    gone: threading.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v2/rerank"


class RerankHandler(BaseHTTPRequestHandler):
    server: RerankServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((dict(self.headers), body))
        status = self.server.script.pop(0) if self.server.script else 200
        self.server.answers_left -= 1
        if self.server.answers_left < 0:
            self.server.gone.wait(60)
            return
        results = [
            {"index": i, "relevance_score": float(text.split("-")[-1])} for i, text in enumerate(body["documents"])
        ]
        results.sort(key=lambda row: -row["relevance_score"])
        payload = json.dumps({"results": results} if status == 200 else {"message": "no"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[RerankServer]:
    running = RerankServer(("127.0.0.1", 0), RerankHandler)
    running.script, running.asked, running.gone = [], [], threading.Event()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.gone.set()
    running.shutdown()
    running.server_close()
    thread.join()


def collection_of(folder: Path, num_queries: int = 12, num_documents: int = 4) -> Path:
    make_collection(folder, {f"q{number}": [None] * num_documents for number in range(num_queries)})
    (folder / "qrels.txt").unlink()
    return folder


def call(folder: Path, server: RerankServer, output: Path, *more: str) -> list[str]:
    return [
        "label",
        "--collection",
        str(folder),
        "--teacher",
        server.url,
        "--api-model",
        "m",
        "--output",
        str(output),
        *more,
    ]


class PlaceTeacher:
    """Scores a passage by the number at the end of its text, and counts how often every query is asked."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.fail_after = fail_after

    def identity(self) -> dict[str, Any]:
        return {"kind": "toy", "name": "place"}

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        if self.fail_after is not None and sum(self.asked.values()) >= self.fail_after:
            raise RuntimeError("power cut")
        self.asked.update(query for query, _ in lists)
        return [np.array([float(document.text.split("-")[-1]) for document in documents]) for _, documents in lists]


def test_an_endpoints_scores_become_a_run_and_its_key_stays_secret(
    tmp_path: Path, server: RerankServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRANK_API_KEY", "very-secret")
    output = tmp_path / "labels" / "web.trec"
    assert main(call(collection_of(tmp_path / "web", 3), server, output, "--ranks", "1-2,4")) == 0
    run = read_run(output)
    assert [(row.doc_id, row.score) for row in run["q1"]] == [("dq1-3", 3.0), ("dq1-1", 1.0), ("dq1-0", 0.0)]
    headers, body = server.asked[0]
    assert headers["Authorization"] == "Bearer very-secret" and body["model"] == "m" and body["top_n"] == 3
    known = json.loads(Path(f"{output}.json").read_text())
    assert (
        known["format"] == "headrank-labels/1"
        and known["is_complete"]
        and (known["queries"], known["passages"]) == (3, 9)
    )
    assert known["inputs"]["teacher"]["name"] == "m" and known["inputs"]["settings"]["ranks"] == [1, 2, 4]
    assert set(known["inputs"]["files"]) == {"queries.tsv", "corpus.jsonl", "run.bm25.txt"}
    assert "very-secret" not in Path(f"{output}.json").read_text() + "".join(capsys.readouterr())
    assert not list(output.parent.glob("*.partial*"))


def test_a_busy_server_is_asked_again_and_a_refusal_is_one_line(
    tmp_path: Path, server: RerankServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = collection_of(tmp_path / "web", 1)
    server.script = [503, 429]
    assert main(call(folder, server, tmp_path / "a.trec")) == 0 and len(server.asked) == 3
    server.script = [401]
    assert main(call(folder, server, tmp_path / "b.trec")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "HTTP 401" in error and server.url in error and not (tmp_path / "b.trec").exists()


def test_the_key_may_be_in_a_file(tmp_path: Path, server: RerankServer) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    words = call(
        collection_of(tmp_path / "web", 1), server, tmp_path / "a.trec", "--api-key-file", str(tmp_path / "key")
    )
    assert main(words) == 0
    assert server.asked[0][0]["Authorization"] == "Bearer from-a-file"


def test_a_killed_run_goes_on_and_loses_and_doubles_nothing(tmp_path: Path, server: RerankServer) -> None:
    folder, output = collection_of(tmp_path / "web", 40), tmp_path / "web.trec"
    server.answers_left = 20
    words = [sys.executable, "-m", "headrank", *call(folder, server, output)]
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    # two whole calls of 8, four of the third, four that hang
    while len(server.asked) < 24 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(server.asked) == 24 and not output.exists()
    (partial,) = tmp_path.glob("web.trec.partial-*.jsonl")
    finished = [json.loads(line)["query_id"] for line in partial.read_text().splitlines()]
    assert len(finished) == 16
    with open(partial, "a") as stream:
        stream.write('{"query_id": "q7", "doc')  # a line torn by the kill
    server.asked.clear()
    server.answers_left = 1_000_000
    assert main(call(folder, server, output)) == 0
    assert len(server.asked) == 24 and not {f"query {query_id}" for query_id in finished} & {
        body["query"] for _, body in server.asked
    }
    run = read_run(output)
    assert set(run) == {f"q{number}" for number in range(40)} and all(len(rows) == 4 for rows in run.values())


def test_a_deadline_writes_what_is_there_and_the_next_call_goes_on(tmp_path: Path) -> None:
    collection, output, teacher = (
        Collection.open(collection_of(tmp_path / "web", 30)),
        tmp_path / "web.trec",
        PlaceTeacher(),
    )
    counts = label_collection(collection, lambda: teacher, output, LabelSettings(), deadline=time.monotonic() - 1)
    assert (counts.now, counts.total, counts.is_complete) == (8, 30, False) and len(read_run(output)) == 8
    first = PlaceTeacher(fail_after=8)
    with pytest.raises(RuntimeError, match="power cut"):
        label_collection(collection, lambda: first, output, LabelSettings())
    second = PlaceTeacher()
    counts = label_collection(collection, lambda: second, output, LabelSettings())
    assert (counts.before, counts.now, counts.is_complete) == (16, 14, True)
    assert set((teacher.asked + first.asked + second.asked).values()) == {1} and len(read_run(output)) == 30
    third = PlaceTeacher()
    assert label_collection(collection, lambda: third, output, LabelSettings()).now == 0 and not third.asked


def test_an_unfinished_run_is_a_random_sample_not_the_beginning_of_the_file(tmp_path: Path) -> None:
    collection, teacher = Collection.open(collection_of(tmp_path / "web", 100)), PlaceTeacher(fail_after=24)
    with pytest.raises(RuntimeError):
        label_collection(collection, lambda: teacher, tmp_path / "web.trec", LabelSettings())
    places = [int(query.removeprefix("query q")) for query in teacher.asked]
    assert max(places) > 60 and min(places) < 40


@pytest.mark.parametrize("change", ["ranks", "corpus", "teacher", "foreign"])
def test_what_was_made_otherwise_is_refused_with_the_reason(tmp_path: Path, change: str) -> None:
    folder, output, settings = collection_of(tmp_path / "web", 3), tmp_path / "web.trec", LabelSettings(ranks=(1, 2))
    if change == "foreign":
        output.write_text("q0 Q0 dq0-0 1 5 someone\n")
    else:
        label_collection(Collection.open(folder), PlaceTeacher, output, settings)
    before = output.read_bytes()
    said = {
        "ranks": "ranks was",
        "corpus": "corpus.jsonl changed",
        "teacher": "teacher.name was place",
        "foreign": "not made by",
    }
    teacher = PlaceTeacher()
    if change == "ranks":
        settings = LabelSettings(ranks=(1, 3))
    if change == "corpus":
        (folder / "corpus.jsonl").write_text((folder / "corpus.jsonl").read_text().replace("text of", "words of"))
    if change == "teacher":
        teacher.identity = lambda: {"kind": "toy", "name": "other"}  # type: ignore[method-assign]
    with pytest.raises(InputError, match=said[change]):
        label_collection(Collection.open(folder), lambda: teacher, output, settings)
    assert output.read_bytes() == before
    assert label_collection(Collection.open(folder), lambda: teacher, output, settings, restart=True).is_complete


def test_scores_that_are_not_finite_stop_the_run_and_name_the_query(tmp_path: Path) -> None:
    class Broken(PlaceTeacher):
        def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
            return [scores * np.nan for scores in super().score_lists(lists)]

    with pytest.raises(InputError, match="query 'q0'"):
        label_collection(
            Collection.open(collection_of(tmp_path / "web", 1)), Broken, tmp_path / "web.trec", LabelSettings()
        )
    assert not (tmp_path / "web.trec").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "3-1"], "ranks begin at 1 and ascend"),
        (["--ranks", "0-4"], "ranks begin at 1"),
        (["--ranks", "first"], "is not a rank"),
    ],
)
def test_ranks_that_make_no_sense_are_one_line(
    tmp_path: Path, server: RerankServer, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(call(tmp_path, server, tmp_path / "a.trec", *words))
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_endpoint_without_a_model_and_a_model_without_an_endpoint_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(collection_of(tmp_path / "web", 1))
    start = ["label", "--collection", folder, "--output", str(tmp_path / "a.trec"), "--teacher"]
    assert main([*start, "http://127.0.0.1:9/v2/rerank"]) == 2
    assert "add --api-model" in capsys.readouterr().err
    assert main([*start, "embedded", "--api-model", "m"]) == 2
    assert "is no URL" in capsys.readouterr().err
