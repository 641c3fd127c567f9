"""The endpoint client against a real HTTP server with scripted moods: busy, refusing, broken, gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrank.errors import InputError
from headrank.generation.generation import EndpointGenerator, Message
from headrank.methods import build_ranker

GOOD = (200, {"choices": [{"message": {"content": "[2] > [1]"}}], "usage": {"total_tokens": 21}})
PROMPT = [[Message("user", "rank")]]


class Server(ThreadingHTTPServer):
    """Answers with the next (status, JSON) of ``script``, the last one for ever, and keeps what it was asked."""

    script: list[tuple[int, Any]]
    asked: list[tuple[str, dict[str, str], dict[str, Any]]]

    @property
    def api_base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    """One scripted answer a request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, answer = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    running.script, running.asked = [GOOD], []
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def test_a_request_is_greedy_without_thinking_and_carries_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    answers = EndpointGenerator(server.api_base, "some-model").generate(PROMPT, num_identifiers=2)
    path, headers, body = server.asked[0]
    assert (answers[0].text, answers[0].num_tokens) == ("[2] > [1]", 21)
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["model"] == "some-model" and body["temperature"] == 0 and body["max_tokens"] == 16
    assert body["messages"] == [{"role": "user", "content": "rank"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_without_a_key_none_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    EndpointGenerator(server.api_base, "m").generate(PROMPT, num_identifiers=2)
    assert "Authorization" not in server.asked[0][1]


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.script = [(503, {"error": "loading"}), (429, {"error": "slow down"}), (200, b"not json"), GOOD]
    assert EndpointGenerator(server.api_base, "m", retries=3).generate(PROMPT, num_identifiers=2)[0].text == "[2] > [1]"
    assert len(server.asked) == 4


def test_a_server_that_stays_busy_is_one_clear_error(server: Server) -> None:
    server.script = [(500, {"error": "out of memory"})]
    with pytest.raises(InputError, match=r"no answer after 3 tries \(HTTP 500: .*out of memory"):
        EndpointGenerator(server.api_base, "m", retries=2).generate(PROMPT, num_identifiers=2)
    assert len(server.asked) == 3


def test_a_refusal_is_not_repeated(server: Server) -> None:
    server.script = [(401, {"error": "wrong key"})]
    with pytest.raises(InputError, match="HTTP 401: .*wrong key"):
        EndpointGenerator(server.api_base, "m").generate(PROMPT, num_identifiers=2)
    assert len(server.asked) == 1


def test_a_server_that_does_not_know_the_thinking_switch_is_asked_without_it(server: Server) -> None:
    server.script = [(400, {"error": "Unrecognized request argument supplied: chat_template_kwargs"}), GOOD]
    generator = EndpointGenerator(server.api_base, "m", retries=0, concurrency=1)
    assert generator.generate(PROMPT * 2, num_identifiers=2)[1].text == "[2] > [1]"
    assert ["chat_template_kwargs" in body for _, _, body in server.asked] == [True, False, False]


def test_an_answer_that_is_no_chat_completion_is_named(server: Server) -> None:
    server.script = [(200, {"object": "list"})]
    with pytest.raises(InputError, match="no chat completion"):
        EndpointGenerator(server.api_base, "m").generate(PROMPT, num_identifiers=2)


def test_an_empty_answer_ranks_in_the_old_order(server: Server) -> None:
    server.script = [(200, {"choices": [{"message": {"content": None}}]})]
    ranker = build_ranker("rankgpt", "m", api_base=server.api_base)
    assert list(ranker.score_batch([("q", ["a", "b", "c"])])[0].scores) == [3, 2, 1]
    assert ranker.success["half"] == 0.0


def test_answers_come_back_in_the_order_of_the_prompts(server: Server) -> None:
    ranker = build_ranker("rankgpt", "m", api_base=server.api_base, batch_size=4)
    results = ranker.score_batch([(f"q{n}", ["a", "b"]) for n in range(9)])
    assert [list(result.scores) for result in results] == [[1, 2]] * 9
    asked = sorted(body["messages"][0]["content"][-4:] for _, _, body in server.asked)
    assert asked == sorted(f" q{n}." for n in range(9))


def test_nobody_listening_and_bad_addresses_are_clear_errors(server: Server) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(InputError, match="is the server running"):
        EndpointGenerator(server.api_base, "m", retries=0).generate(PROMPT, num_identifiers=2)
    with pytest.raises(InputError, match="http://"):
        EndpointGenerator("localhost:8000/v1", "m")
