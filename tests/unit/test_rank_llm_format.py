"""rank_llm's request files: what rank_llm itself writes is read, what it could not read back is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.formats import Candidate, Document
from headrank.reranking.rank_llm_format import read_candidates_jsonl, write_candidates_jsonl


def request(**changes: object) -> dict:
    candidate = {"docid": "d1", "score": 2.5, "doc": {"title": "T", "text": "body"}}
    return {"query": {"text": "a query", "qid": "1"}, "candidates": [candidate], **changes}


def candidate(**changes: object) -> dict:
    return {"docid": "e", "score": 1, "doc": {"text": "body"}, **changes}


def test_ids_may_be_numbers_and_texts_have_the_fields_of_anserini_indexes(tmp_path: Path) -> None:
    rows = [
        candidate(docid=7, doc={"contents": "seven"}),
        candidate(docid="m1", doc={"passage": "one", "title": None}),
        candidate(docid="m2", doc={"segment": "two"}),
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"query": {"text": "a query", "qid": 264014}, "candidates": rows}) + "\n")
    queries, run, corpus = read_candidates_jsonl(path)
    assert queries == {"264014": "a query"}
    assert run["264014"] == [Candidate("7", 1, 1.0), Candidate("m1", 2, 1.0), Candidate("m2", 3, 1.0)]
    assert [document.text for document in corpus.values()] == ["seven", "one", "two"]


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_a_json_list_as_rank_llm_stores_retrieval_results_is_read(
    tmp_path: Path, packed: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "retrieve_results.json"
    listed = json.dumps([request(), request(query={"text": "other", "qid": "2"}, candidates=[])], indent=2)
    path.write_bytes(packed(listed.encode()))
    queries, run, corpus = read_candidates_jsonl(path)
    assert queries == {"1": "a query", "2": "other"}
    assert run["2"] == []
    assert corpus == {"d1": Document("d1", "T", "body")}


def test_documents_without_a_known_text_are_written_without_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_candidates_jsonl(
        path, {"1": "a query"}, {"1": [("d1", 2.0), ("far", 1.0)]}, {"d1": Document("d1", "", "body")}
    )
    row = json.loads(path.read_text())
    assert row == {
        "query": {"text": "a query", "qid": "1"},
        "candidates": [
            {"docid": "d1", "score": 2.0, "doc": {"title": "", "text": "body"}},
            {"docid": "far", "score": 1.0, "doc": {}},
        ],
    }


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (request(query={"text": "no id"}), "qid"),
        (request(query={"text": " ", "qid": "2"}), "qid"),
        (request(query="just text"), "qid"),
        (request(query={"text": "again", "qid": "1"}), "appears twice"),
        ({"query": {"text": "x", "qid": "2"}}, "candidates"),
        (request(query={"text": "x", "qid": "2"}, candidates=["d1"]), "candidate 1 needs"),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(docid="a b")]), "docid 'a b'"),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(score="high")]), "score 'high'"),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(score=True)]), "score 'True'"),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(score=10**400)]), "not a finite number"),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(doc={})]), "has no text"),
        (
            request(query={"text": "x", "qid": "2"}, candidates=[candidate(docid="d1", doc={"text": "another body"})]),
            "another text",
        ),
        (request(query={"text": "x", "qid": "2"}, candidates=[candidate(), candidate()]), "a candidate twice"),
    ],
)
def test_a_bad_request_is_named_by_its_line(tmp_path: Path, row: dict, words: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(request()) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError) as raised:
        read_candidates_jsonl(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert words in str(raised.value)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="empty"):
        read_candidates_jsonl(tmp_path / "empty.jsonl")
