"""Lists to fit a readout on: candidates of one or more collections, with grades, a teacher's scores, or both.

A list depends on its collection, labels and settings alone, so that statistics kept on disk are found again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection as Ids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrank.errors import InputError
from headrank.formats import Candidate, Collection, Document, Qrels, Run, read_run


@dataclass(frozen=True)
class ReadoutList:
    """One query with the passages that were labelled, in the retriever's order."""

    collection: str
    query_id: str
    query: str
    doc_ids: tuple[str, ...]
    documents: tuple[tuple[str, str], ...]  # (title, text), the text cut as it is read
    grades: tuple[int | None, ...]  # None where nobody judged
    teacher: tuple[float, ...] | None
    # all judgements of the query, also of passages outside the list; empty where there are none
    judged: Mapping[str, int]

    @property
    def key(self) -> str:
        """Names the list among those of all collections."""
        return f"{self.collection}/{self.query_id}"


def collection_lists(
    collection: Collection,
    labels: str | None = None,
    *,
    depth: int = 40,
    list_words: Sequence[int] = (),
    most_lists: int | None = None,
    only: Ids[str] | None = None,
) -> list[ReadoutList]:
    """The lists of one collection: passages that the teacher's run ``labels`` scored, or all of them where grades are
    the labels.

    ``list_words`` cuts the passages of each list to one of these lengths, fixed by the query id, so that a fit sees
    several. ``most_lists`` takes a sample that only grows with the number.
    """
    queries, run = collection.queries(), collection.run()
    qrels = collection.qrels() if collection.qrels_path is not None else {}
    scored = read_run(labels) if labels is not None else None
    _check(collection, labels, qrels, scored)
    known = scored if scored is not None else qrels
    chosen = [query for query in queries if query in run and query in known and (only is None or query in only)]
    if most_lists is not None:
        chosen = sorted(chosen, key=lambda query: _digest("readout", query))[:most_lists]
    if not chosen:
        raise InputError(
            f"collection {collection.name}: no query has candidates and labels; check the run and the labels"
        )
    rows = {
        query: [row for row in run[query][:depth] if scored is None or row.doc_id in _scores(scored[query])]
        for query in chosen
    }
    corpus = collection.documents({row.doc_id for found in rows.values() for row in found})
    return [
        _list(collection.name, query, queries[query], rows[query], corpus, qrels.get(query, {}), scored, list_words)
        for query in chosen
        if len(rows[query]) > 1
    ]


def _list(
    collection: str,
    query_id: str,
    query: str,
    rows: Sequence[Candidate],
    corpus: Mapping[str, Document],
    judged: Mapping[str, int],
    scored: Run | None,
    list_words: Sequence[int],
) -> ReadoutList:
    words = list_words[int(_digest("words", query_id), 16) % len(list_words)] if list_words else None
    documents = [corpus[row.doc_id] for row in rows]
    doc_ids = tuple(row.doc_id for row in rows)
    by_teacher = _scores(scored[query_id]) if scored is not None else None
    return ReadoutList(
        collection,
        query_id,
        query,
        doc_ids,
        tuple((document.title, " ".join(document.text.split()[:words])) for document in documents),
        tuple(judged.get(doc_id) for doc_id in doc_ids),
        None if by_teacher is None else tuple(by_teacher[doc_id] for doc_id in doc_ids),
        judged,
    )


def _check(collection: Collection, labels: str | None, qrels: Qrels, scored: Run | None) -> None:
    if scored is None and not qrels:
        raise InputError(
            f"collection {collection.name}: no qrels.txt; give a teacher's run with `labels` (see 'headrank label')"
        )
    if scored is not None and not scored.keys() & collection.queries().keys():
        raise InputError(
            f"{labels}: no query of {collection.queries_path} is in it; `labels` come in the order of `collection`"
        )


def _scores(rows: Sequence[Candidate]) -> dict[str, float]:
    return {row.doc_id: row.score for row in rows}


def _digest(use: str, query_id: str) -> str:
    return hashlib.sha256(f"{use}:{query_id}".encode()).hexdigest()
