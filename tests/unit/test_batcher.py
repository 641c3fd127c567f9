"""Continuous batching over a real tiny model: identical scores, fairness, and accidents that stay with the one who
had them.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrank.errors import InputError
from headrank.reranking.reranker import HeadRankReranker
from headrank.serving.engine import RerankerEngine
from headrank.serving.fair_queue import FairQueue
from headrank.serving.prometheus import Histogram, Metric, exposition
from tests.serving_client import (
    DOCUMENTS,
    QUERY,
    Answer,
    Running,
    late_heads,
    moody,
    running_server,
    tiny_settings,
    wait_until,
)

WORDS = (
    "the flea lives for two months and needs a warm host concrete floors cost six dollars rosin grips a violin string"
).split()


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> RerankerEngine:
    return RerankerEngine.load(tiny_settings(tiny_model("qwen3")))


@pytest.fixture(scope="module", params=["sequential", "late"])
def any_engine(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> RerankerEngine:
    """The engine in one prompt, and in the late layout."""
    heads = "all" if request.param == "sequential" else late_heads(tmp_path_factory.mktemp("heads"))
    return RerankerEngine.load(tiny_settings(tiny_model("qwen3"), heads=heads))


def random_list(seed: int) -> dict[str, object]:
    """A query with 1 to 6 passages of 1 to 30 words."""
    chance = random.Random(seed)
    documents = [" ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(chance.randint(1, 6))]
    return {"query": " ".join(chance.choices(WORDS, k=5)), "documents": documents}


def ask_while_busy(running: Running, gate: threading.Event, bodies: list[dict[str, object]]) -> list[Answer]:
    """Hold the model, let all of ``bodies`` queue behind one request, then let go."""
    answers: dict[int, Answer] = {}
    first = threading.Thread(target=running.ask, args=("/rerank", {"query": QUERY, "documents": DOCUMENTS}))
    first.start()
    wait_until(lambda: running.metric("vllm:num_requests_running") == 1)

    def ask(place: int) -> None:
        answers[place] = running.ask("/rerank", bodies[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for place, thread in enumerate(threads):
        thread.start()
        wait_until(lambda place=place: running.metric("te_queue_size") == place + 1)
    gate.set()
    for thread in [first, *threads]:
        thread.join()
    return [answers[place] for place in range(len(bodies))]


def test_requests_that_share_a_batch_have_the_scores_of_a_single_offline_request(any_engine: RerankerEngine) -> None:
    engine = any_engine
    offline = HeadRankReranker.from_reader(engine.reranker.reader, engine.reranker.heads, key_cache_bytes=0)
    gate, bodies = threading.Event(), [random_list(seed) for seed in range(16)]
    load = moody(engine, gate=gate)
    with running_server(tiny_settings(Path("unused"), max_batch_tokens=100_000), load) as running:
        answers = ask_while_busy(running, gate, bodies)
        assert running.metric("headrank_batches_total") == 2
    for body, answer in zip(bodies, answers, strict=True):
        alone = offline.score(body["query"], body["documents"])
        assert {row["index"]: row["relevance_score"] for row in answer.json["results"]} == dict(
            enumerate(alone.tolist())
        )
        assert [row["document"]["text"] for row in answer.json["results"]] == [
            body["documents"][row["index"]] for row in answer.json["results"]
        ]


def test_a_batch_holds_no_more_than_its_budget(engine: RerankerEngine) -> None:
    gate = threading.Event()
    load = moody(engine, gate=gate)
    body = {"query": QUERY, "documents": ["flea " * 40]}  # estimated at 16 + 225 / 4 tokens
    with running_server(tiny_settings(Path("unused"), max_batch_tokens=160), load) as running:
        ask_while_busy(running, gate, [body] * 5)
        calls = running.state.engine.calls
    assert [len(queries) for queries in calls] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("poison", "status", "said"),
    [
        (InputError("the query is bad"), 422, "the query is bad"),
        (RuntimeError("secret text"), 500, "its log says where"),
    ],
)
def test_a_poisoned_request_fails_alone(
    engine: RerankerEngine, poison: Exception, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate, bodies = threading.Event(), [random_list(seed) for seed in range(6)]
    bodies[3]["query"] = "poison"
    load = moody(engine, gate=gate, poison=poison)
    with running_server(tiny_settings(Path("unused"), max_batch_tokens=100_000), load) as running:
        answers = ask_while_busy(running, gate, bodies)
        assert running.metric("headrank_failed_alone_total") == 1
        assert running.ask("/rerank", bodies[0]).status == 200
    assert [answer.status for answer in answers] == [200, 200, 200, status, 200, 200]
    assert said in answers[3].message
    assert "secret" not in answers[3].body.decode() + caplog.text
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status == 200:
            alone = engine.reranker.score(body["query"], body["documents"])
            assert {row["index"]: row["relevance_score"] for row in answer.json["results"]} == dict(
                enumerate(alone.tolist())
            )


def test_out_of_memory_halves_the_batch_and_the_budget_and_goes_on(engine: RerankerEngine) -> None:
    gate, bodies = threading.Event(), [random_list(seed) for seed in range(8)]
    load = moody(engine, gate=gate, most_lists=2)
    with running_server(tiny_settings(Path("unused"), max_batch_tokens=100_000), load) as running:
        answers = ask_while_busy(running, gate, bodies)
        assert running.metric("headrank_out_of_memory_total") == 3  # 8, 4 and 4 lists
        assert running.metric("headrank_batch_token_budget") == 100_000 // 8
        assert [len(queries) for queries in running.state.engine.calls] == [1, 8, 4, 2, 2, 4, 2, 2]
    assert {answer.status for answer in answers} == {200}


def test_a_list_that_alone_is_too_large_is_413(engine: RerankerEngine) -> None:
    with running_server(tiny_settings(Path("unused")), moody(engine, most_lists=0)) as running:
        answer = running.ask("/rerank", random_list(0))
        assert answer.status == 413 and "memory" in answer.message
        assert running.metric("headrank_batch_token_budget") == 2048, "no smaller budget would have helped"


def test_a_full_queue_is_429_and_says_when_to_come_back(engine: RerankerEngine) -> None:
    gate = threading.Event()
    with running_server(tiny_settings(Path("unused"), max_queue=2), moody(engine, gate=gate)) as running:
        answers: list[Answer] = []

        def late() -> None:
            answers.append(running.ask("/rerank", random_list(9)))

        waiting = threading.Thread(target=lambda: answers.extend(ask_while_busy_and(running, gate, late)))
        waiting.start()
        waiting.join()
    assert sorted(answer.status for answer in answers) == [200, 200, 429]
    refused = next(answer for answer in answers if answer.status == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60 and refused.json["error"]["type"] == "overloaded"


def ask_while_busy_and(running: Running, gate: threading.Event, late: Callable[[], None]) -> list[Answer]:
    """Two requests wait; ``late`` comes while they do."""
    held = threading.Event()

    class Both:
        def set(self) -> None:
            late()
            held.set()
            gate.set()

    return ask_while_busy(running, Both(), [random_list(1), random_list(2)])  # type: ignore[arg-type]


def test_a_request_whose_time_is_up_gets_503_and_is_not_computed(engine: RerankerEngine) -> None:
    gate = threading.Event()
    with running_server(tiny_settings(Path("unused"), request_seconds=0.3), moody(engine, gate=gate)) as running:
        first = running.ask("/rerank", random_list(0))
        assert first.status == 503 and "within 0.3 seconds" in first.message and "retry-after" in first.headers
        second = running.ask("/rerank", random_list(1))
        assert second.status == 503
        gate.set()
        wait_until(lambda: running.metric("vllm:num_requests_running") == running.metric("te_queue_size") == 0)
        assert len(running.state.engine.calls) == 1, "the second was never computed"
        assert running.metric("headrank_abandoned_total") == 2


def test_a_client_that_leaves_is_not_computed_for(engine: RerankerEngine) -> None:
    gate = threading.Event()
    with running_server(tiny_settings(Path("unused")), moody(engine, gate=gate)) as running:
        first = threading.Thread(target=running.ask, args=("/rerank", random_list(0)))
        first.start()
        wait_until(lambda: running.metric("vllm:num_requests_running") == 1)
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaving:
            body = b'{"query": "flea", "documents": ["a flea"]}'
            head = (
                "POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
                f"{len(body)}\r\n\r\n"
            )
            leaving.sendall(head.encode() + body)
            wait_until(lambda: running.metric("te_queue_size") == 1)
        wait_until(lambda: running.metric("headrank_abandoned_total") == 1)
        gate.set()
        first.join()
        wait_until(lambda: running.metric("te_queue_size") == 0)
        assert len(running.state.engine.calls) == 1


def test_draining_finishes_what_was_taken(engine: RerankerEngine) -> None:
    gate, answers = threading.Event(), []
    with running_server(tiny_settings(Path("unused")), moody(engine, gate=gate)) as running:
        taken = threading.Thread(target=lambda: answers.append(running.ask("/rerank", random_list(0))))
        taken.start()
        wait_until(lambda: running.metric("vllm:num_requests_running") == 1)
        running.server.handle_exit(15, None)
        wait_until(lambda: running.state.phase == "draining")
        assert running.ask("/rerank", random_list(1)).status == 503
        assert running.ask("/health").status == 200 and running.ask("/ready").status == 503
        gate.set()
        taken.join()
        wait_until(lambda: running.server.should_exit)
    assert [answer.status for answer in answers] == [200]


def test_explanations_take_turns_with_batches_and_end_with_their_time(engine: RerankerEngine) -> None:
    gate, order = threading.Event(), []

    class Noting(RerankerEngine):
        def score(self, lists: Sequence[Any]) -> list[Any]:
            order.append(lists[0][0])
            return super().score(lists)

        def explain(self, query: str, *more: Any) -> Any:
            order.append(f"explain {query}")
            assert gate.wait(60)
            return super().explain(query, *more)

    noting = Noting(engine.reranker, "tiny")
    with running_server(tiny_settings(Path("unused"), request_seconds=1000.0), lambda settings: noting) as running:
        wordy = [{"query": f"w{number}", "documents": DOCUMENTS, "return_highlights": True} for number in range(3)]
        threads = [threading.Thread(target=running.ask, args=("/rerank", body)) for body in wordy]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.state.service is not None and running.state.service.batcher._calls == 3)
        plain = threading.Thread(target=running.ask, args=("/rerank", {"query": "plain", "documents": DOCUMENTS}))
        plain.start()
        wait_until(lambda: running.metric("vllm:num_requests_running") == 1)
        assert not running.state.service.is_idle
        gate.set()
        for thread in [plain, *threads]:
            thread.join()
        explained = [name for name in order if name.startswith("explain")]
        assert len(explained) == 3 and order.index("plain") < order.index(explained[1]), (
            "it waited for one explanation, not for all"
        )
        gate.clear()
        held = threading.Thread(target=running.ask, args=("/rerank", wordy[0]))
        held.start()
        wait_until(lambda: running.state.service.batcher._calls == 1)
        object.__setattr__(running.state.settings, "request_seconds", 0.5)
        answer = running.ask("/rerank", wordy[1])
        assert answer.status == 503 and "Retry-After".lower() in answer.headers
        gate.set()
        held.join()


class Item:
    """A request in a queue."""

    def __init__(self, client: str, num_tokens: int, is_gone: bool = False) -> None:
        self.client, self.num_tokens, self.is_gone = client, num_tokens, is_gone


def test_one_request_is_not_starved_by_anothers_thousand() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.add(Item("heavy", 10))
    queue.add(Item("light", 10))
    assert [item.client for item in queue.take(20)] == ["heavy", "light"]


def test_clients_share_tokens_and_not_requests() -> None:
    queue = FairQueue()
    for _ in range(12):
        queue.add(Item("long", 30))
        queue.add(Item("short", 10))
    served = [item.client for _ in range(12) for item in queue.take(10)]
    assert served.count("short") == 9 and served.count("long") == 3


def test_within_a_client_the_first_is_first_and_the_gone_are_skipped() -> None:
    queue = FairQueue()
    items = [Item("a", 5), Item("a", 5, is_gone=True), Item("a", 7), Item("a", 1)]
    for item in items:
        queue.add(item)
    assert len(queue) == 4 and queue.num_tokens == 18
    assert queue.take(12) == [items[0], items[2]]
    assert queue.take(12) == [items[3]] and queue.take(12) == []
    assert len(queue) == queue.num_tokens == 0


def test_a_request_larger_than_the_budget_goes_alone() -> None:
    queue = FairQueue()
    large = Item("a", 500)
    queue.add(large)
    queue.add(Item("b", 1))
    assert queue.take(100) == [large]


def test_idling_saves_nothing_up() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(Item("steady", 10))
    queue.take(200)
    for _ in range(50):
        queue.add(Item("late", 10))
    clients = [item.client for item in queue.take(200)]
    assert clients.count("late") == clients.count("steady") == 10


def test_the_exposition_is_prometheus_text() -> None:
    counter = Metric("te_request_failure", "counter", "Failures.")
    counter.add(err='a"b\\\n')
    counter.add(2, err="400")
    histogram = Histogram("seconds", "Time.", (0.5, 1.0))
    for value in (0.5, 0.6, 7.0):
        histogram.observe(value)
    assert exposition([counter, histogram]) == (
        "# HELP te_request_failure Failures.\n# TYPE te_request_failure counter\n"
        'te_request_failure{err="a\\"b\\\\\\n"} 1\nte_request_failure{err="400"} 2\n'
        "# HELP seconds Time.\n# TYPE seconds histogram\n"
        'seconds_bucket{le="0.5"} 1\nseconds_bucket{le="1"} 2\nseconds_bucket{le="+Inf"} 3\nseconds_sum '
        "8.1\nseconds_count 3\n"
    )


def test_lists_that_share_passages_in_the_late_layout_still_get_their_own_scores(any_engine: RerankerEngine) -> None:
    bodies = [
        {"query": f"{query} {QUERY}", "documents": DOCUMENTS[turn:] + DOCUMENTS[:turn]}
        for turn, query in enumerate(("when", "why", "so"))
    ]
    gate = threading.Event()
    with running_server(
        tiny_settings(Path("unused"), max_batch_tokens=100_000), moody(any_engine, gate=gate)
    ) as running:
        answers = ask_while_busy(running, gate, bodies)
    for body, answer in zip(bodies, answers, strict=True):
        alone = any_engine.reranker.score(body["query"], body["documents"])
        assert {row["index"]: row["relevance_score"] for row in answer.json["results"]} == dict(
            enumerate(alone.tolist())
        )
