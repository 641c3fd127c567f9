"""Reranking requests: a query with the candidates to rerank in prompt order, from a collection or a rank_llm file;
and their scores.
"""

from __future__ import annotations

from collections.abc import Collection as Ids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrank.errors import InputError
from headrank.formats import Candidate, Collection, Document, Run
from headrank.method.ordering import random_order
from headrank.reranking.rank_llm_format import parse_request, read_candidates_jsonl


@dataclass(frozen=True)
class Request:
    """One query: the candidates within the depth with their texts, and the ids beyond it in their old order."""

    query_id: str
    query: str
    candidates: tuple[Candidate, ...]
    documents: tuple[Document, ...]
    rest: tuple[str, ...]


@dataclass(frozen=True)
class ListScores:
    """The result for one query, documents in the order they were given."""

    scores: np.ndarray  # float32 [N]
    num_tokens: int
    is_shortened: bool = False
    positions: tuple[int, ...] = ()  # where each stood in the prompt, from 1; empty where no prompt was made


def requests_from_collection(
    collection: Collection, *, depth: int, shuffle: int | None = None, only: Ids[str] | None = None
) -> list[Request]:
    """The candidates of a collection's run; a run of unknown queries or documents is an error."""
    queries, candidates = collection.queries(), collection.run()
    unknown = sorted(set(candidates) - set(queries))
    if unknown:
        raise InputError(
            f"{collection.run_path}: query {unknown[0]!r} is not in {collection.queries_path} ({len(unknown)} such "
            "queries)"
        )
    # only what is read: a corpus may hold millions of texts
    corpus = collection.documents({row.doc_id for rows in candidates.values() for row in rows[:depth]})
    return _requests(queries, candidates, corpus, depth, shuffle, only)


def requests_from_file(
    path: str, *, depth: int, shuffle: int | None = None, only: Ids[str] | None = None
) -> list[Request]:
    """The requests of a rank_llm JSONL file, which carries queries, candidates and texts together."""
    return _requests(*read_candidates_jsonl(path), depth, shuffle, only)


def request_from_row(
    place: str, row: Mapping[str, object], corpus: dict[str, Document], *, depth: int, shuffle: int | None = None
) -> Request | None:
    """One rank_llm request, where a file holds too many to be read at once; None where there is nothing to rerank. All
    of its texts go into ``corpus``.
    """
    query_id, query, candidates = parse_request(place, row, corpus)
    return _request(query_id, query, candidates, corpus, depth, shuffle) if candidates else None


def _requests(
    queries: Mapping[str, str],
    candidates: Run,
    corpus: Mapping[str, Document],
    depth: int,
    shuffle: int | None,
    only: Ids[str] | None,
) -> list[Request]:
    """In the order of the query file; queries without candidates have nothing to rerank."""
    chosen = (query_id for query_id in queries if candidates.get(query_id) and (only is None or query_id in only))
    return [_request(query_id, queries[query_id], candidates[query_id], corpus, depth, shuffle) for query_id in chosen]


def _request(
    query_id: str,
    query: str,
    rows: Sequence[Candidate],
    corpus: Mapping[str, Document],
    depth: int,
    shuffle: int | None,
) -> Request:
    """Cut at the depth; a shuffle depends on its seed and the query alone, so a subset of queries gets the same
    orders.
    """
    # cut before the shuffle: the same candidates are reranked in every order
    head = list(rows[:depth])
    if shuffle is not None:
        head = [head[rank] for rank in random_order(len(head), "rerank", shuffle, query_id)]
    rest = tuple(row.doc_id for row in rows[depth:])
    return Request(query_id, query, tuple(head), tuple(corpus[row.doc_id] for row in head), rest)
