"""Whatever bytes a file holds, a reader returns records or raises InputError with the file's name: never anything
else.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools.contexts import iterate_contexts, iterate_pairs
from headrank.errors import InputError
from headrank.formats import (
    Candidate,
    Document,
    iterate_corpus,
    read_corpus,
    read_qrels,
    read_queries,
    read_run,
    write_jsonl,
    write_run,
)
from headrank.reranking.rank_llm_format import read_candidates_jsonl, write_candidates_jsonl

BOUNDED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
READERS = {
    "queries": read_queries,
    "qrels": read_qrels,
    "run": read_run,
    "corpus": read_corpus,
    "requests": read_candidates_jsonl,
    "contexts": lambda path: list(iterate_contexts(path)),
    "pairs": lambda path: list(iterate_pairs(path)),
}
# fragments that look almost right find more than noise does
fragments = st.sampled_from(
    [
        "q1",
        "\t",
        " ",
        "0",
        "Q0",
        "d1",
        "3",
        "-2",
        "1e9",
        "nan",
        "tag",
        "\r\n",
        "\n",
        "\ufeff",
        '{"docid": "d1", ',
        '"text": "t"}',
        '{"query": ',
        "[",
        "]",
        "{}",
        "}",
        ",",
    ]
    + ['"candidates": ', '"score": 1', '"context_id": "c"', "null", "\\ud800", "\x00", "\x1c", "\u2028", "\x85"]
)
contents = st.one_of(
    st.binary(max_size=200),
    st.lists(fragments, max_size=30).map(lambda parts: "".join(parts).encode()),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)
identifiers = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=8).filter(
    lambda text: text.split() == [text]
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.mark.parametrize("name", sorted(READERS))
@BOUNDED
@given(content=contents, zipped=st.booleans())
def test_readers_return_or_raise_an_input_error(tmp_path: Path, name: str, content: bytes, zipped: bool) -> None:
    path = tmp_path / "fuzz"
    path.write_bytes(gzip.compress(content) if zipped else content)
    try:
        READERS[name](path)
    except InputError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


@BOUNDED
@given(content=st.binary(max_size=300), cut=st.integers(0, 40), flip=st.integers(0, 300))
def test_damaged_archives_raise_an_input_error(tmp_path: Path, content: bytes, cut: int, flip: int) -> None:
    damaged = bytearray(gzip.compress(content)[: -cut or None])
    if 2 <= flip < len(damaged):
        damaged[flip] ^= 0x5A
    path = tmp_path / "fuzz.gz"
    path.write_bytes(bytes(damaged))
    try:
        read_queries(path)
    except InputError as error:
        assert str(path) in str(error)


@BOUNDED
@given(
    rows=st.dictionaries(
        identifiers,
        st.lists(
            st.tuples(identifiers, st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)),
            min_size=1,
            max_size=5,
            unique_by=lambda row: row[0],
        ),
        min_size=1,
        max_size=4,
    )
)
def test_runs_survive_writing_and_reading(tmp_path: Path, rows: dict[str, list[tuple[str, float]]]) -> None:
    import numpy as np

    write_run(tmp_path / "run.txt", rows, "tag")
    back = read_run(tmp_path / "run.txt")
    assert {query_id: [(row.doc_id, np.float32(row.score)) for row in listed] for query_id, listed in back.items()} == {
        query_id: [(doc_id, np.float32(score)) for doc_id, score in listed] for query_id, listed in rows.items()
    }


@BOUNDED
@given(documents=st.lists(st.tuples(identifiers, texts, texts), min_size=1, max_size=5, unique_by=lambda row: row[0]))
def test_corpora_survive_writing_and_reading(tmp_path: Path, documents: list[tuple[str, str, str]]) -> None:
    write_jsonl(
        tmp_path / "corpus.jsonl",
        ({"docid": doc_id, "title": title, "text": text} for doc_id, title, text in documents),
    )
    assert list(iterate_corpus(tmp_path / "corpus.jsonl")) == [Document(*row) for row in documents]


@BOUNDED
@given(
    documents=st.lists(st.tuples(identifiers, texts, texts), min_size=1, max_size=5, unique_by=lambda row: row[0]),
    query_id=identifiers,
)
def test_requests_survive_writing_and_reading(
    tmp_path: Path, documents: list[tuple[str, str, str]], query_id: str
) -> None:
    corpus = {row[0]: Document(*row) for row in documents}
    ranked = {query_id: [(doc_id, 1.0 / place) for place, doc_id in enumerate(corpus, start=1)]}
    write_candidates_jsonl(tmp_path / "requests.jsonl", {query_id: "a query"}, ranked, corpus)
    queries, run, back = read_candidates_jsonl(tmp_path / "requests.jsonl")
    assert queries == {query_id: "a query"}
    assert back == corpus
    assert run[query_id] == [
        Candidate(doc_id, place, score) for place, (doc_id, score) in enumerate(ranked[query_id], start=1)
    ]
