"""What a request may ask beyond its dialect: chunks, caps, thresholds, relevance in [0, 1], sentences. Late layout,
tiny real model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank.method.relevance import RelevanceCurve
from headrank.reranking.explain import TokenScores
from headrank.serving.engine import RerankerEngine
from headrank.serving.highlights import pruned_text, sentence_spans, sentences_of
from tests.serving_client import DOCUMENTS, QUERY, Running, late_heads, running_server, tiny_settings

LONG = " ".join(f"Sentence {number} says that the flea lives for {number} months." for number in range(12))
CURVE = RelevanceCurve("platt", slope=0.3, intercept=-0.5)


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    heads = late_heads(tmp_path_factory.mktemp("heads"), room=128)
    with running_server(tiny_settings(tiny_model("qwen3"), heads=heads, max_chunks_per_doc=20)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(served: Running) -> RerankerEngine:
    assert served.state.engine is not None
    return served.state.engine


@pytest.fixture(scope="module")
def with_relevance(engine: RerankerEngine) -> Iterator[Running]:
    calibrated = RerankerEngine(engine.reranker, "tiny", CURVE)
    with running_server(tiny_settings(Path("unused")), lambda settings: calibrated) as running:
        yield running


def by_index(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["index"]: row for row in rows}


def test_a_long_document_has_the_score_of_its_best_chunk(served: Running, engine: RerankerEngine) -> None:
    row = by_index(served.ask("/v2/rerank", {"query": QUERY, "documents": [LONG, DOCUMENTS[0]]}).json["results"])
    chunk = row[0]["chunk"]
    assert row[0]["relevance_score"] == float(engine.reranker.score(QUERY, [LONG[chunk["start"] : chunk["end"]]])[0])
    assert "is_truncated" not in row[0] and "chunk" not in row[1]
    assert row[0]["relevance_score"] >= float(engine.reranker.score(QUERY, [LONG])[0]) - 1.0


def test_one_chunk_is_the_offline_score_and_says_that_it_was_cut(served: Running, engine: RerankerEngine) -> None:
    body = {"query": QUERY, "documents": [LONG, DOCUMENTS[0]], "max_chunks_per_doc": 1}
    answer = served.ask("/v2/rerank", body).json
    rows = by_index(answer["results"])
    assert [rows[index]["relevance_score"] for index in (0, 1)] == engine.reranker.score(
        QUERY, [LONG, DOCUMENTS[0]]
    ).tolist()
    assert rows[0]["is_truncated"] is True and "is_truncated" not in rows[1]
    assert "is_truncated" in answer["meta"]["warnings"][0]
    assert served.metric("headrank_documents_cut_total") >= 1


def test_a_cap_of_tokens_cuts_and_says_so(served: Running, engine: RerankerEngine) -> None:
    body = {"query": QUERY, "documents": [LONG, "a flea"], "max_tokens_per_doc": 10}
    rows = by_index(served.ask("/v1/rerank", body).json["results"])
    end = int(engine.token_offsets([LONG])[0][9][1])
    assert (
        rows[0]["relevance_score"] == float(engine.reranker.score(QUERY, [LONG[:end]])[0])
        and rows[0]["is_truncated"] is True
    )
    assert rows[0]["document"]["text"] == LONG, "the document comes back whole"
    same = by_index(
        served.ask("/rerank", body | {"max_tokens_per_doc": None, "truncate_prompt_tokens": 10}).json["results"]
    )
    assert same[0]["relevance_score"] == rows[0]["relevance_score"]


def test_what_is_found_in_memory_is_in_the_metrics(served: Running) -> None:
    body = {"query": QUERY, "documents": ["asked for the first time", "and this one, too"]}
    asked, found, hits = (f"headrank_recent_passages_{name}" for name in ("asked_total", "found_total", "bytes"))
    before = [served.metric(name) for name in (asked, found)]
    served.ask("/v2/rerank", body)
    assert [served.metric(asked) - before[0], served.metric(found) - before[1]] == [2, 0] and served.metric(hits) > 0
    served.ask("/v2/rerank", body)
    assert [served.metric(asked) - before[0], served.metric(found) - before[1]] == [4, 2]
    assert served.metric("vllm:prefix_cache_queries") > served.metric("vllm:prefix_cache_hits") > 0


def test_a_document_may_stand_twice_in_a_list(served: Running) -> None:
    rows = by_index(
        served.ask("/v2/rerank", {"query": QUERY, "documents": [DOCUMENTS[0], DOCUMENTS[0]]}).json["results"]
    )
    assert rows[0]["relevance_score"] == rows[1]["relevance_score"]


def test_truncation_can_be_forbidden_in_both_dialects(served: Running) -> None:
    refused = served.ask("/rerank", {"query": QUERY, "texts": ["a", LONG * 12], "truncate": False})
    assert refused.status == 413 and refused.json["param"] == "texts[1]" and refused.json["error_type"] == "Validation"
    body = {"query": QUERY, "documents": [LONG], "truncation": False, "max_tokens_per_doc": 10}
    assert served.ask("/v1/rerank", body).json["error"]["param"] == "documents[0]"
    assert served.ask("/rerank", {"query": QUERY, "texts": [LONG], "truncate": False}).status == 200, (
        "chunks lose nothing"
    )


def test_tei_chooses_which_end_is_cut(served: Running) -> None:
    scores = {}
    for direction in ("left", "Right"):
        [row] = served.ask(
            "/rerank", {"query": QUERY, "texts": [LONG * 12], "truncation_direction": direction, "truncate": True}
        ).json
        assert row["is_truncated"] is True
        scores[direction] = row["chunk"]
    assert scores["left"]["end"] > scores["Right"]["end"]
    assert served.ask("/rerank", {"query": QUERY, "texts": ["a"], "truncation_direction": "up"}).status == 400


def test_a_threshold_leaves_out_what_is_below(served: Running) -> None:
    rows = served.ask("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS}).json["results"]
    middle = rows[1]["relevance_score"]
    kept = served.ask("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "threshold": middle}).json["results"]
    assert kept == rows[:2]
    assert (
        served.ask(
            "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "threshold": 1e9, "return_highlights": True}
        ).json["results"]
        == []
    )


def test_relevance_is_the_curve_of_the_score_with_the_score_beside_it(
    with_relevance: Running, engine: RerankerEngine
) -> None:
    raw = engine.reranker.score(QUERY, DOCUMENTS)
    rows = by_index(with_relevance.ask("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS}).json["results"])
    for index, score in enumerate(raw):
        assert rows[index]["raw_score"] == float(score)
        assert rows[index]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-(0.3 * float(score) - 0.5))))
    tei = by_index(with_relevance.ask("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json)
    assert [tei[index]["score"] for index in range(3)] == raw.tolist()
    score = with_relevance.ask("/score", {"queries": QUERY, "documents": DOCUMENTS, "use_activation": False}).json[
        "data"
    ]
    assert [row["score"] for row in score] == raw.tolist()
    assert with_relevance.ask("/info").json["relevance"]["kind"] == "platt"


def test_the_curve_of_a_file_is_found_and_a_broken_one_refused(
    engine: RerankerEngine, tmp_path: Path, tiny_model: Any
) -> None:
    from headrank.errors import InputError
    from headrank.serving.engine import find_relevance

    path = tmp_path / "curve.json"
    path.write_text(json.dumps(CURVE.to_dict()))
    assert find_relevance(tiny_settings(tiny_model("qwen3"), relevance=str(path))) == CURVE
    assert find_relevance(tiny_settings(tiny_model("qwen3"))) is None
    path.write_text("{}")
    with pytest.raises(InputError, match="relevance: "):
        find_relevance(tiny_settings(tiny_model("qwen3"), relevance=str(path)))


def test_highlights_are_sentences_that_add_up_to_the_score(served: Running) -> None:
    text = "Concrete floors cost six dollars. The flea lives for two months! Rosin grips."
    body = {
        "query": QUERY,
        "documents": [text, {"title": "Fleas", "text": DOCUMENTS[0]}],
        "return_highlights": True,
        "top_n": 2,
    }
    rows = by_index(served.ask("/v1/rerank", body).json["results"])
    sentences = rows[0]["highlights"]
    assert [sentence["text"] for sentence in sentences] == text.replace("! ", "!|").replace(". ", ".|").split("|")
    assert sum(sentence["score"] for sentence in sentences) == pytest.approx(rows[0]["relevance_score"], abs=1e-3)
    assert rows[0]["pruned_text"] == " ".join(sentence["text"] for sentence in sentences if sentence["is_kept"])
    assert rows[1]["highlights"][0]["text"] == "Fleas", "the title is read as the first line"


def test_highlights_in_a_layout_of_lists_explain_the_list_that_was_ranked(tiny_model: Callable[[str], Path]) -> None:
    with running_server(tiny_settings(tiny_model("qwen3"))) as running:
        body = {"query": QUERY, "documents": DOCUMENTS, "return_highlights": True, "top_n": 1}
        [row] = running.ask("/v2/rerank", body).json["results"]
        assert sum(sentence["score"] for sentence in row["highlights"]) == pytest.approx(
            row["relevance_score"], abs=1e-4
        )


def test_sentences_by_hand() -> None:
    text = "One two. Three!  Four"
    assert [text[start:end] for start, end in sentence_spans(text)] == ["One two.", "Three!", "Four"]
    assert sentence_spans(" \n ") == [] and [("一。二。"[a:b]) for a, b in sentence_spans("一。二。")] == ["一。二。"]
    offsets = np.array([[0, 3], [3, 8], [9, 15], [17, 21]])
    tokens = TokenScores(
        text, offsets, np.array([[1.0, 2.0, -1.0, 9.0], [0.0, 0.0, 0.0, 1.0]]), np.array([True, True, True, True])
    )
    found = sentences_of(tokens)
    assert [sentence.score for sentence in found] == [3.0, -1.0, 10.0]
    assert [round(sentence.share, 3) for sentence in found] == [0.231, 0.0, 0.769]
    assert pruned_text(found) == "Four"
