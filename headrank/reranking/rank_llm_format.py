"""The request files of rank_llm: a query and its candidates with their texts, one object per line (or one JSON list).

{"query": {"text": "...", "qid": "1"}, "candidates": [{"docid": "d1", "score": 9.2, "doc": {"title": "", "text":
"..."}}]}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrank.errors import InputError
from headrank.files import parse_object, read_json, read_lines, write_jsonl
from headrank.formats import Candidate, Document, Run

_TEXT_KEYS = ("text", "contents", "content", "segment", "passage", "body")  # as the indexes of Anserini spell it


def read_candidates_jsonl(path: str | os.PathLike[str]) -> tuple[dict[str, str], Run, dict[str, Document]]:
    """Read requests: query id -> text, query id -> candidates in file order (rank from 1), document id -> document.

    A file that is one JSON list, as rank_llm writes retrieval results, is read too. One document id with two texts is
    an error: ids must be unique in the file, not only within a query.
    """
    queries: dict[str, str] = {}
    run: Run = {}
    corpus: dict[str, Document] = {}
    for place, row in _rows(path):
        query_id, query, candidates = parse_request(place, row, corpus)
        if query_id in queries:
            raise InputError(f"{place}: query {query_id!r} appears twice; remove one request")
        queries[query_id], run[query_id] = query, candidates
    if not queries:
        raise InputError(f"{path}: no requests; the file is empty")
    return queries, run, corpus


def parse_request(place: str, row: Mapping[str, Any], corpus: dict[str, Document]) -> tuple[str, str, list[Candidate]]:
    """(query id, query, candidates in file order) of one request; their texts go into ``corpus``. ``place`` is for
    messages.
    """
    query_id, query = _query(place, row)
    listed = row.get("candidates")
    if not isinstance(listed, list):
        raise InputError(f"{place}: query {query_id!r} needs a list of 'candidates'")
    candidates = [_candidate(place, rank, item, corpus) for rank, item in enumerate(listed, start=1)]
    if len({candidate.doc_id for candidate in candidates}) < len(listed):
        raise InputError(f"{place}: query {query_id!r} has a candidate twice; remove one")
    return query_id, query, candidates


def write_candidates_jsonl(
    path: str | os.PathLike[str],
    queries: Mapping[str, str],
    ranked: Mapping[str, Sequence[tuple[str, float]]],
    documents: Mapping[str, Document],
) -> None:
    """Write (document id, score) lists, best first, as rank_llm results; a document without a known text gets an
    empty doc.
    """

    def doc(doc_id: str) -> dict[str, str]:
        document = documents.get(doc_id)
        return {} if document is None else {"title": document.title, "text": document.text}

    write_jsonl(
        path,
        (
            {
                "query": {"text": queries[query_id], "qid": query_id},
                "candidates": [{"docid": doc_id, "score": score, "doc": doc(doc_id)} for doc_id, score in rows],
            }
            for query_id, rows in ranked.items()
        ),
    )


def text_of(doc: Mapping[str, Any]) -> Any:
    """The text of a candidate's ``doc``, under whichever name; None where there is none."""
    return next((doc[key] for key in _TEXT_KEYS if key in doc), None)


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, request) of a JSONL file or of a JSON list."""
    first = next(iter(read_lines(path)), None)
    if first is None or not first[1].lstrip().startswith("["):
        for number, line in read_lines(path):
            yield f"{path}:{number}", parse_object(path, number, line)
        return
    listed = read_json(path)
    for number, row in enumerate(listed if isinstance(listed, list) else [], start=1):
        place = f"{path}: request {number}"
        yield place, parse_object(place, number, json.dumps(row))


def _identifier(value: object) -> str | None:
    """An id as text; rank_llm allows numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return value if isinstance(value, str) and value.split() == [value] else None


def _query(place: str, row: Mapping[str, Any]) -> tuple[str, str]:
    query = row.get("query")
    text, query_id = (query.get("text"), _identifier(query.get("qid"))) if isinstance(query, dict) else (None, None)
    if query_id is None or not isinstance(text, str) or not text.strip():
        raise InputError(f'{place}: needs "query": {{"text": "...", "qid": "..."}} with an id without spaces')
    return query_id, text


def _candidate(place: str, rank: int, item: object, corpus: dict[str, Document]) -> Candidate:
    """One candidate; its document goes into ``corpus``."""
    if not isinstance(item, dict) or not isinstance(item.get("doc"), dict):
        raise InputError(f'{place}: candidate {rank} needs "docid", "score" and "doc"')
    doc_id, score, doc = _identifier(item.get("docid")), item.get("score"), item["doc"]
    if doc_id is None:
        raise InputError(f"{place}: candidate {rank} has the docid {item.get('docid')!r}; it needs one without spaces")
    text, title = text_of(doc), doc.get("title") or ""
    if not isinstance(text, str) or not isinstance(title, str):
        raise InputError(f"{place}: candidate {doc_id!r} has no text; 'doc' needs one of {', '.join(_TEXT_KEYS)}")
    document = Document(doc_id, title, text)
    if corpus.setdefault(doc_id, document) != document:
        raise InputError(
            f"{place}: document {doc_id!r} has another text than before in the file; give each document its own id"
        )
    return Candidate(doc_id, rank, _finite(place, doc_id, score))


def _finite(place: str, doc_id: str, score: object) -> float:
    try:
        value = float(score) if isinstance(score, int | float) and not isinstance(score, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise InputError(
            f"{place}: candidate {doc_id!r} has the score {str(score)[:40]!r}, which is not a finite number"
        )
    return value
