"""`headrank serve` as a real process: load without a lost or swapped answer, kill -9 and restart, SIGTERM."""

from __future__ import annotations

import shutil
import signal
import threading
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import serving_load
from benchmarks.server_process import ServerProcess
from headrank.passage_store.indexing import IndexSettings, index_corpus
from headrank.reranking.late_reranker import LateReranker
from headrank.reranking.reranker import HeadRankReranker
from tests.serving_client import late_heads

NUM_LISTS, NUM_PASSAGES = 12, 6
GONE = (urllib.error.URLError, ConnectionError, TimeoutError)  # what a client sees of a server that was killed


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    return late_heads(tmp_path_factory.mktemp("heads"), room=128)


def test_a_small_load_without_a_store_is_answered_in_full_and_to_the_bit(
    model: str, heads: str, embedded_collection: Path
) -> None:
    arguments = ["--model", model, "--heads", heads, "--collection", str(embedded_collection), "--without-store-only"]
    assert (
        serving_load.main(
            [*arguments, "--requests", "48", "--lists", "12", "--passages", "6", "--concurrency", "1", "8"]
        )
        == 0
    )


def test_a_wrong_answer_a_lost_one_and_growing_memory_are_noticed() -> None:
    listed = serving_load.Listed("q", [{"text": "a"}, {"text": "b"}], [0.5, 0.25])
    outcome = serving_load.Outcome(False, 1, 1)
    right = b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": 0.25}]}'
    serving_load._note(outcome, listed, 200, right, 0.1)
    assert outcome.is_good(0.0)
    serving_load._note(outcome, listed, 200, right.replace(b"0.25", b"0.2500000001"), 0.1)
    assert outcome.wrong == 1 and not outcome.is_good(0.0)
    assert not serving_load.Outcome(False, 1, requests=2, answered=1).is_good(0.0)
    flat, growing = [100] * 8, [100] * 6 + [110, 110]
    assert serving_load.Outcome(False, 1, 0, memory=flat).is_good(0.03) and not serving_load.Outcome(
        False, 1, 0, memory=growing
    ).is_good(0.03)


class Clients:
    """Threads that ask all the time, whatever happens to the server, and keep every answer that is not the expected
    one.
    """

    def __init__(self, server: ServerProcess, pool: list[serving_load.Listed]) -> None:
        self.server, self.pool, self.wrong, self.right, self.gone = server, pool, [], 0, 0
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(start,)) for start in range(4)]
        for thread in self.threads:
            thread.start()

    def _work(self, number: int) -> None:
        while not self.stopped.is_set():
            listed = self.pool[number % len(self.pool)]
            number += 1
            try:
                scores = self.server.rerank(listed.query, listed.documents)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    self.wrong.append(error.code)
            except GONE:
                self.gone += 1
            else:
                self.right += 1
                if scores != dict(enumerate(listed.scores)):
                    self.wrong.append(scores)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(120)

    def wait_for(self, more: int) -> None:
        """Return after so many more right answers."""
        wanted = self.right + more
        while self.right < wanted and not self.wrong:
            assert not self.stopped.wait(0.01)


def test_killed_and_started_again_on_the_same_store_and_port_it_answers_the_same(
    model: str, heads: str, embedded_collection: Path, tmp_path: Path
) -> None:
    lists = serving_load.lists_of(str(embedded_collection), NUM_LISTS, NUM_PASSAGES)
    pool = store_with_the_first_lists(tmp_path, model, heads, lists)
    flags = ["--model", model, "--heads", heads, "--store", str(tmp_path / "store"), "--store-add"]
    with ServerProcess(flags) as first:
        first.wait_until_ready()
        with Clients(first, pool) as clients:
            clients.wait_for(6)  # passages are being computed and added
            first.process.kill()
            assert first.process.wait(60) == -signal.SIGKILL
            with ServerProcess([*flags, "--port", str(first.port)]) as second:
                second.wait_until_ready()
                clients.wait_for(3 * NUM_LISTS)
                found = second.metrics()
                second.process.send_signal(signal.SIGTERM)
                assert second.process.wait(60) == 0, second.log
                assert "requests unanswered" not in second.log and "Traceback" not in second.log
        assert clients.wrong == [] and clients.gone > 0
    assert 0 < found["headrank_store_passages_found_total"] <= found["headrank_store_passages_asked_total"]
    whole = HeadRankReranker.from_pretrained(model, heads, store=tmp_path / "store")
    assert serving_load.make_pool(whole, lists) == pool
    assert isinstance(whole, LateReranker) and whole.usage.store_found > 0


def store_with_the_first_lists(folder: Path, model: str, heads: str, lists: list) -> list[serving_load.Listed]:
    """A store that holds some of the passages, and the scores of all lists by a copy of it that has them all."""
    reranker = HeadRankReranker.from_pretrained(model, heads)
    assert isinstance(reranker, LateReranker)
    passages = list(
        dict.fromkeys((document["title"], document["text"]) for _, documents in lists[:4] for document in documents)
    )
    index_corpus(folder / "store", reranker.late, lambda: iter(passages), IndexSettings("int8"))
    shutil.copytree(folder / "store", folder / "copy")
    filled = HeadRankReranker.from_pretrained(model, heads, store=folder / "copy", store_add=True)
    return serving_load.make_pool(filled, lists)


def test_texts_are_in_the_log_only_when_asked_for(model: str, heads: str, tmp_path: Path) -> None:
    query, document, key = "a very secret query", "a very secret document", "correct-horse-battery"
    path = tmp_path / "keys"
    path.write_text(key)
    with ServerProcess(["--model", model, "--heads", heads, "--log-requests"]) as server:
        server.wait_until_ready()
        server.rerank(query, [document, ""])
        with pytest.raises(urllib.error.HTTPError):
            server.rerank("", [document])
        log = server.log
    assert "secret" not in log and "POST /v2/rerank 200, 2 documents" in log and "POST /v2/rerank 400" in log
