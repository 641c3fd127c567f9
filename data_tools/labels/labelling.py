"""A teacher scores the candidates of a collection: a TREC run with raw scores, and beside it a file that says how it
was made.

Finished queries are appended to RUN.partial-*.jsonl as they come, so a kill at any moment loses at most the lists in
work. Queries are taken in a seeded random order: what an unfinished run holds is a fair sample of the collection.
Running again continues, also after a stop at a deadline; what other settings, other files or another teacher made is
refused.
"""

from __future__ import annotations

import datetime
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.labels.sources import PROVENANCE_FORMAT, provenance_path
from data_tools.teachers.teacher import Teacher
from headrank.artifacts import content_digest, describe_change, fingerprint
from headrank.errors import InputError
from headrank.formats import Collection, Document, read_json, read_run, write_json, write_run
from headrank.provenance import versions
from headrank.reranking.partial_results import PartialResults

LISTS_PER_CALL = 8  # a teacher may batch over these; a kill loses at most these


@dataclass(frozen=True)
class LabelSettings:
    """What is labelled: the retriever's ranks (from 1), of which queries, in which random order."""

    ranks: tuple[int, ...] = tuple(range(1, 21))
    only: frozenset[str] | None = None
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What decides the labels; the order in which queries are taken does not."""
        return {"ranks": list(self.ranks), "only": None if self.only is None else fingerprint(sorted(self.only))}


@dataclass(frozen=True)
class LabelCounts:
    """Queries labelled before, labelled now, and in all."""

    before: int
    now: int
    total: int
    passages: int

    @property
    def is_complete(self) -> bool:
        """Whether every query has its labels."""
        return self.before + self.now == self.total


def label_collection(
    collection: Collection,
    open_teacher: Callable[[], Teacher],
    output: Path,
    settings: LabelSettings,
    *,
    tag: str = "teacher",
    restart: bool = False,
    deadline: float | None = None,
    command: Sequence[str] = (),
    watch: Callable[[int, int], Callable[[int], object]] = lambda done, total: lambda more: None,
) -> LabelCounts:
    """Label what is not labelled yet, write the run and its provenance, and return the counts.

    ``deadline`` is a time.monotonic() after which no new list is begun; the run is then written with what is there.
    ``watch`` gets how many queries are done and are to be done, and returns a function that is told of every few more.
    """
    lists = _lists(collection, settings)
    teacher = open_teacher()
    inputs = {"settings": settings.to_dict(), "teacher": teacher.identity(), "files": _digests(collection)}
    store = PartialResults(output, fingerprint(inputs), 0, restart=restart)
    earlier = {} if restart else _earlier_rows(output, inputs)
    # finished rows of a killed run win over the last written run, which is older
    done = {query_id: row for query_id, row in (earlier | store.done).items() if query_id in lists}
    before = len(done)
    # in random order: a run that was stopped early is then a fair sample of the queries, and not their beginning
    pending = [query_id for query_id in _random_order(lists, settings.seed) if query_id not in done]
    texts = collection.documents({doc_id for query_id in pending for doc_id in lists[query_id][1]}) if pending else {}
    tell, started = watch(before, len(lists)), time.monotonic()
    try:
        for chunk in _chunks(pending, LISTS_PER_CALL):
            rows = list(_score(teacher, chunk, lists, texts))
            store.add(rows)
            done |= {row["query_id"]: row for row in rows}
            tell(len(rows))
            if deadline is not None and time.monotonic() >= deadline:
                break  # after a call, not before: a run is never empty, and short deadlines get somewhere too
    finally:
        store.close()
    counts = LabelCounts(before, len(done) - before, len(lists), sum(len(row["doc_ids"]) for row in done.values()))
    facts = {
        "queries": len(done),
        "of_queries": len(lists),
        "passages": counts.passages,
        "seconds": round(time.monotonic() - started, 1),
    }
    _write(output, {query_id: done[query_id] for query_id in lists if query_id in done}, inputs, facts, tag, command)
    store.discard()
    return counts


def _lists(collection: Collection, settings: LabelSettings) -> dict[str, tuple[str, list[str]]]:
    """Query id -> text and the documents at the wanted ranks, in the order of the query file."""
    queries, run = collection.queries(), collection.run()
    unknown = next((query_id for query_id in run if query_id not in queries), None)
    if unknown is not None:
        raise InputError(
            f"{collection.run_path}: query {unknown!r} is not in {collection.queries_path}; add its text or remove it"
        )
    missing = sorted(settings.only - queries.keys()) if settings.only is not None else []
    if missing:
        raise InputError(f"`only`: query {missing[0]!r} is not in {collection.queries_path}; correct the list")
    found = {}
    for query_id, text in queries.items():
        rows = run.get(query_id, [])
        doc_ids = [rows[rank - 1].doc_id for rank in settings.ranks if rank <= len(rows)]
        if doc_ids and (settings.only is None or query_id in settings.only):
            found[query_id] = (text, doc_ids)
    if not found:
        raise InputError(
            f"{collection.run_path}: no candidates at the ranks that are to be labelled; check `ranks` and `only`"
        )
    return found


def _digests(collection: Collection) -> dict[str, str]:
    """The content of what is read; names without folders, so that a collection may move."""
    paths = [collection.queries_path, collection.corpus_path, collection.run_path]
    # by content: labels are copied between machines, where times and paths differ
    return {path.name: content_digest(path) for path in paths if path is not None}


def _earlier_rows(output: Path, inputs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The labels of a run that is already there; one that something else made is refused, with the reason in words."""
    if not output.exists():
        return {}
    beside = provenance_path(output)
    if not beside.is_file():
        raise InputError(
            f"{output}: is there and was not made by 'headrank label'; give another `output`, or `restart` to "
            "replace it"
        )
    known = read_json(beside)
    if (
        not isinstance(known, dict)
        or known.get("format") != PROVENANCE_FORMAT
        or not isinstance(known.get("inputs"), dict)
    ):
        raise InputError(
            f"{beside}: not a {PROVENANCE_FORMAT} file; give another `output`, or `restart` to replace both"
        )
    change = describe_change(known["inputs"], inputs)
    if change is not None:
        raise InputError(f"{output}: {change}; give another `output`, or `restart` to label all again")
    run = read_run(output)
    return {
        query_id: {"query_id": query_id, "doc_ids": [row.doc_id for row in rows], "scores": [row.score for row in rows]}
        for query_id, rows in run.items()
    }


def _random_order(query_ids: Iterable[str], seed: int) -> list[str]:
    order = sorted(query_ids)
    random.Random(seed).shuffle(order)
    return order


def _score(
    teacher: Teacher, chunk: Sequence[str], lists: Mapping[str, tuple[str, list[str]]], texts: Mapping[str, Document]
) -> Iterator[dict[str, Any]]:
    asked = [(lists[query_id][0], [texts[doc_id] for doc_id in lists[query_id][1]]) for query_id in chunk]
    for query_id, scores in zip(chunk, teacher.score_lists(asked), strict=True):
        if not np.isfinite(scores).all():
            raise InputError(
                f"query {query_id!r}: the teacher gave {scores[~np.isfinite(scores)][0]}; are its weights whole?"
            )
        yield {"query_id": query_id, "doc_ids": lists[query_id][1], "scores": [float(score) for score in scores]}


def _write(
    output: Path,
    rows: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Any],
    facts: Mapping[str, Any],
    tag: str,
    command: Sequence[str],
) -> None:
    """The provenance first: a run without it would be refused, provenance without a run is only a note."""
    beside = provenance_path(output)
    made_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    is_complete = facts["queries"] == facts["of_queries"]
    described = {
        "format": PROVENANCE_FORMAT,
        "is_complete": is_complete,
        **facts,
        "tag": tag,
        "made_at": made_at,
        "command": list(command),
    }
    write_json(beside, {**described, "versions": versions(), "inputs": dict(inputs)})
    run = {}
    for query_id, row in rows.items():
        # stable: equal scores keep the retriever's order
        order = np.argsort(-np.asarray(row["scores"], np.float64), kind="stable")
        run[query_id] = [(row["doc_ids"][place], row["scores"][place]) for place in order]
    write_run(output, run, tag)


def _chunks(items: Sequence[str], size: int) -> Iterator[list[str]]:
    left = iter(items)
    while chunk := list(itertools.islice(left, size)):
        yield chunk
