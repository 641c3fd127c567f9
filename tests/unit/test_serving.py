"""The server's dialects, limits, keys and states over real HTTP on loopback, with a tiny real model."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank.errors import InputError
from headrank.reranking.reranker import HeadRankReranker
from headrank.serving.access import ApiKeys
from headrank.serving.engine import RerankerEngine
from headrank.serving.settings import ServeSettings
from tests.serving_client import DOCUMENTS, QUERY, Running, moody, running_server, tiny_settings, wait_until

KEY, OTHER_KEY = "correct-horse-battery", "another-horse-battery"
BODY = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Running]:
    with running_server(
        tiny_settings(model, max_documents=50, max_list_tokens=2000, max_body_bytes=100_000)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def offline(model: Path) -> np.ndarray:
    """The scores of DOCUMENTS without a server."""
    return HeadRankReranker.from_pretrained(str(model), "all").score(QUERY, DOCUMENTS)


def ranked(scores: np.ndarray) -> list[tuple[int, float]]:
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")]


@pytest.mark.parametrize("path", ["/v2/rerank", "/v1/rerank", "/rerank"])
def test_rerank_answers_are_the_offline_scores_bit_by_bit(served: Running, offline: np.ndarray, path: str) -> None:
    answer = served.ask(path, BODY)
    assert answer.status == 200
    assert [(row["index"], row["relevance_score"]) for row in answer.json["results"]] == ranked(offline)


def test_cohere_gets_an_id_and_meta_and_no_texts(served: Running) -> None:
    answer = served.ask("/v2/rerank", BODY | {"model": "rerank-v3.5", "top_n": 2}).json
    assert len(answer["results"]) == 2 and set(answer["results"][0]) == {"index", "relevance_score"}
    assert answer["id"] and answer["meta"]["billed_units"] == {"search_units": 1}


def test_jina_and_vllm_get_texts_usage_and_model(served: Running) -> None:
    answer = served.ask("/v1/rerank", BODY).json
    assert answer["model"] == "tiny" and answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    assert all(row["document"] == {"text": DOCUMENTS[row["index"]]} for row in answer["results"])
    assert "document" not in served.ask("/v1/rerank", BODY | {"return_documents": False}).json["results"][0]
    assert len(served.ask("/rerank", BODY | {"top_n": 0}).json["results"]) == 3, "vLLM's clients send 0 for all"


def test_tei_is_known_by_texts_and_gets_a_bare_list(served: Running, offline: np.ndarray) -> None:
    answer = served.ask(
        "/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True, "raw_scores": True, "truncate": False}
    )
    assert [(row["index"], row["score"]) for row in answer.json] == ranked(offline)
    assert all(row["text"] == DOCUMENTS[row["index"]] for row in answer.json)
    assert int(answer.headers["x-compute-tokens"]) > 0 and int(answer.headers["x-total-time"]) >= int(
        answer.headers["x-inference-time"]
    )
    assert set(served.ask("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json[0]) == {"index", "score"}


@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2")])
def test_score_keeps_the_order_of_the_request(served: Running, offline: np.ndarray, names: tuple[str, str]) -> None:
    answer = served.ask("/score", dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json
    assert [row["score"] for row in answer["data"]] == offline.tolist()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2] and answer["object"] == "list"


def test_score_pairs_are_lists_of_one(served: Running, model: Path) -> None:
    queries = [QUERY, "what does a floor cost", "what is rosin for"]
    answer = served.ask("/v1/score", {"queries": queries, "documents": DOCUMENTS}).json
    alone = HeadRankReranker.from_pretrained(str(model), "all")
    expected = [float(alone.score(query, [text])[0]) for query, text in zip(queries, DOCUMENTS, strict=True)]
    assert [row["score"] for row in answer["data"]] == expected
    assert served.ask("/v1/score", {"queries": queries, "documents": DOCUMENTS[:2]}).message == (
        "queries: 3 queries and 2 documents: give one query, or as many as documents"
    )


def test_documents_may_be_objects_with_titles(served: Running, model: Path) -> None:
    documents = [{"text": DOCUMENTS[0], "title": "Fleas", "url": "x"}, DOCUMENTS[1]]
    answer = served.ask("/v2/rerank", {"query": QUERY, "documents": documents}).json
    scores = HeadRankReranker.from_pretrained(str(model), "all").score(QUERY, documents)
    assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == ranked(scores)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v2/rerank", {"documents": DOCUMENTS}, "query"),
        ("/v2/rerank", {"query": QUERY}, "documents"),
        ("/v2/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/v2/rerank", {"query": QUERY, "documents": "a string"}, "documents"),
        ("/v2/rerank", {"query": QUERY, "documents": ["a", 3]}, "documents[1]"),
        ("/v2/rerank", {"query": QUERY, "documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ("/v2/rerank", {"query": 7, "documents": ["a"]}, "query"),
        ("/v2/rerank", {"query": QUERY, "documents": ["a"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "top_n": "2"}, "top_n"),
        ("/rerank", {"query": QUERY, "documents": ["a", None]}, "documents[1]"),
        ("/score", {"text_1": QUERY}, "documents"),
        ("/score", {"queries": [QUERY, 1], "documents": ["a", "b"]}, "queries[1]"),
        ("/rerank", [1], "body"),
        ("/v1/rerank", "text", "body"),
    ],
)
def test_a_body_that_does_not_fit_is_400_and_names_the_field(served: Running, path: str, body: Any, field: str) -> None:
    answer = served.ask(path, body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == field and answer.json["error"]["code"] == 400
    assert answer.message.startswith(f"{field}: ") and "\n" not in answer.message


def test_teis_errors_have_teis_shape(served: Running) -> None:
    answer = served.ask("/rerank", {"query": QUERY, "texts": ["a", 1]})
    assert (
        answer.status == 400
        and answer.json["error"].startswith("texts[1]: ")
        and answer.json["error_type"] == "Validation"
    )
    answer = served.ask("/rerank", {"query": "  ", "texts": ["a"]})
    assert (
        answer.status == 422
        and answer.json["error"].startswith("query: empty")
        and answer.json["error_type"] == "Tokenizer"
    )


@pytest.mark.parametrize("raw", [b"", b"{", b'{"query": "\xff"}', b"[" * 100_000])
def test_what_is_not_json_is_400(served: Running, raw: bytes) -> None:
    answer = served.ask("/rerank", raw=raw)
    assert answer.status == 400 and answer.json["error"]["param"] == "body"


def test_json_without_its_content_type_says_so(served: Running) -> None:
    answer = served.ask("/rerank", BODY, **{"Content-Type": "text/plain"})
    assert answer.status == 400 and "Content-Type: application/json" in answer.message


def test_half_a_surrogate_pair_is_refused(served: Running) -> None:
    answer = served.ask("/v2/rerank", raw=b'{"query": "flea", "documents": ["\\ud800"]}')
    assert (answer.status in (400, 422) and "documents[0]" in answer.message) or "surrogate" in answer.message


def test_too_many_bytes_documents_or_tokens_are_413(served: Running) -> None:
    answer = served.ask("/rerank", BODY | {"padding": "x" * 100_000})
    assert answer.status == 413 and answer.json["error"]["param"] == "body"
    answer = served.ask("/rerank", {"query": QUERY, "documents": ["a"] * 51})
    assert answer.status == 413 and answer.message == "documents: 51 documents; this server ranks at most 50"
    answer = served.ask("/rerank", {"query": QUERY, "texts": ["word " * 2000]})
    assert answer.status == 413 and answer.json["error"].startswith("texts: about")


@pytest.mark.parametrize("length", [9, 100_000 // 6])
def test_a_query_of_too_many_tokens_is_413(model: Path, served: Running, length: int) -> None:
    engine = served.state.engine
    assert engine is not None
    most = len(engine.token_offsets(["flea " * 8])[0])
    with running_server(tiny_settings(model, max_query_tokens=most), lambda settings: engine) as running:
        assert running.ask("/rerank", {"query": "flea " * 8, "documents": DOCUMENTS}).status == 200
        answer = running.ask("/rerank", {"query": "flea " * length, "documents": DOCUMENTS})
        assert (
            answer.status == 413
            and answer.message == f"query: longer than {most} tokens, the limit of this server; shorten it"
        )


def test_a_body_of_undeclared_length_is_limited_too(served: Running) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    chunks = (b"x" * 1000 for _ in range(101))
    connection.request("POST", "/rerank", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_an_unknown_path_and_method_are_json(served: Running) -> None:
    assert served.ask("/v3/rerank", BODY).json["error"]["code"] == 404
    assert served.ask("/rerank").json["error"]["code"] == 405


def test_info_describes_the_model_and_names_no_path(served: Running, model: Path) -> None:
    info = served.ask("/info")
    assert (
        info.json["model_id"] == "tiny"
        and info.json["layout"] == "sequential"
        and info.json["is_score_relative_to_its_list"] is True
    )
    assert str(model).encode() not in info.body
    assert served.ask("/v1/models").json["data"][0]["id"] == "tiny"


def test_openapi_describes_every_path_and_error(served: Running) -> None:
    described = served.ask("/openapi.json").json
    assert set(described["paths"]) >= {
        "/v2/rerank",
        "/v1/rerank",
        "/rerank",
        "/score",
        "/v1/score",
        "/health",
        "/ready",
        "/info",
        "/metrics",
    }
    assert set(described["paths"]["/rerank"]["post"]["responses"]) == {
        "200",
        "400",
        "401",
        "403",
        "408",
        "413",
        "422",
        "429",
        "500",
        "503",
    }
    assert described["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}


def test_metrics_count_what_happened_under_the_names_of_others(model: Path) -> None:
    with running_server(tiny_settings(model)) as running:
        running.ask("/rerank", BODY)
        running.ask("/rerank", {"query": QUERY})
        assert running.metric("te_request_count") == 2
        assert running.metric("te_request_success") == 1
        assert running.metric('te_request_failure{err="400"}') == 1
        assert running.metric("te_request_duration_count") == 2
        assert (
            running.metric("te_batch_next_size_count") == running.metric("vllm:request_queue_time_seconds_count") == 1
        )
        assert running.metric("headrank_documents_total") == 3
        assert running.metric("te_queue_size") == running.metric("vllm:num_requests_running") == 0
        assert running.metric("vllm:prompt_tokens_total") == running.metric("te_request_input_length_sum") > 0


def test_keys_are_needed_where_a_file_has_them(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# two\n{KEY}\n\n{OTHER_KEY}\n")
    path.chmod(0o600)
    with running_server(tiny_settings(model, api_key_file=str(path))) as running:
        for key in (KEY, OTHER_KEY):
            assert running.ask("/rerank", BODY, key=key).status == 200
        for shown in (None, "wrong", KEY[:-1], KEY + "x", ""):
            answer = running.ask("/rerank", BODY, key=shown)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert KEY not in answer.body.decode()
        assert running.ask("/metrics").status == running.ask("/info").status == 401
        assert running.ask("/metrics", key=KEY).status == 200
        assert running.ask("/health").status == running.ask("/ready").status == 200


def test_key_files_are_checked_without_quoting_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("short-secret\n")
    with pytest.raises(InputError, match=r"keys:1: a key has at least 16") as error:
        ApiKeys.read(path)
    assert "short-secret" not in str(error.value)
    path.write_text("# nothing\n")
    with pytest.raises(InputError, match="holds no key"):
        ApiKeys.read(path)
    path.write_text(f"{KEY}\n")
    path.chmod(0o644)
    ApiKeys.read(path)
    assert "chmod 600" in caplog.text


def test_an_address_that_others_reach_needs_keys() -> None:
    assert (
        ServeSettings().host == "127.0.0.1"
        and ServeSettings(host="::1").is_loopback
        and ServeSettings(host="localhost").is_loopback
    )
    with pytest.raises(InputError, match="`api_key_file`"):
        ServeSettings(host="0.0.0.0")
    assert not ServeSettings(host="0.0.0.0", is_open_to_anyone=True).is_loopback


def test_a_port_that_is_taken_is_one_line(served: Running) -> None:
    from headrank.serving.run import bind

    port = int(served.url.rpartition(":")[2])
    with pytest.raises(InputError, match=f"`port` {port}: .*; choose another"):
        bind(ServeSettings(port=port))


def test_loading_and_draining_are_503_with_retry_after(model: Path) -> None:
    gate, engine = threading.Event(), RerankerEngine.load(tiny_settings(model))

    def load(settings: ServeSettings) -> RerankerEngine:
        assert gate.wait(60)
        return moody(engine)(settings)

    with running_server(tiny_settings(model), load, wait=False) as running:
        assert running.ask("/health").status == 200
        for path, body in (("/ready", None), ("/rerank", BODY)):
            answer = running.ask(path, body)
            assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1 and "being loaded" in answer.message
        gate.set()
        wait_until(lambda: running.ask("/ready").status == 200)
        running.state.phase = "draining"
        answer = running.ask("/rerank", BODY)
        assert answer.status == 503 and answer.headers["connection"] == "close" and "about to stop" in answer.message


def test_a_model_that_cannot_be_loaded_stops_the_server_with_its_reason(tmp_path: Path) -> None:
    with running_server(ServeSettings(model=str(tmp_path), heads="all", port=0)) as running:
        wait_until(lambda: running.server.should_exit)
    with pytest.raises(InputError, match=r"config\.json|cannot be loaded"):
        running.state.raise_failure()
