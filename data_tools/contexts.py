"""contexts.jsonl and pairs.jsonl: one candidate list per line, and the preferences within it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import parse_object, read_json, read_lines

CONTEXTS_FILE, PAIRS_FILE, SUMMARY_FILE = "contexts.jsonl", "pairs.jsonl", "pairs.summary.json"


@dataclass(frozen=True, slots=True)
class ContextDocument:
    """A candidate in its context: ``rank`` is the retriever's, ``grade`` is None when nobody judged it.

    With a teacher ``teacher_score`` is its raw score and ``grade_from`` says whose the grade is, 'teacher' or 'qrels'.
    """

    doc_id: str
    title: str
    text: str
    rank: int
    grade: int | None
    teacher_score: float | None = None
    grade_from: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Its object in contexts.jsonl; what only a teacher gives is left out where there is none."""
        row = {name: getattr(self, name) for name in ("doc_id", "title", "text", "rank", "grade")}
        return row | {
            name: value for name in ("teacher_score", "grade_from") if (value := getattr(self, name)) is not None
        }


@dataclass(frozen=True, slots=True)
class Context:
    """A query with its candidates in retriever order."""

    context_id: str
    query_id: str
    query: str
    documents: tuple[ContextDocument, ...]

    def to_dict(self) -> dict[str, Any]:
        """The object of one line of contexts.jsonl."""
        documents = [document.to_dict() for document in self.documents]
        return {"context_id": self.context_id, "query_id": self.query_id, "query": self.query, "documents": documents}


@dataclass(frozen=True, slots=True)
class Pair:
    """One preference: the chosen document's grade is above the rejected one's."""

    context_id: str
    query_id: str
    chosen: str
    rejected: str
    chosen_grade: int
    rejected_grade: int

    def to_dict(self) -> dict[str, Any]:
        """The object of one line of pairs.jsonl."""
        return {name: getattr(self, name) for name in Pair.__slots__}


def iterate_contexts(path: Path) -> Iterator[Context]:
    """Read contexts one by one; file, line and remedy are named when a line is wrong."""
    for number, row in _rows(path):
        context_id, query_id, query = (_string(path, number, row, key) for key in ("context_id", "query_id", "query"))
        listed = row.get("documents")
        if not isinstance(listed, list) or not listed:
            raise InputError(
                f"{path}:{number}: context {context_id!r} needs a list of 'documents'; make the file with 'headrank "
                "pairs'"
            )
        documents = tuple(_document(path, number, item) for item in listed)
        if len({document.doc_id for document in documents}) < len(documents):
            raise InputError(f"{path}:{number}: context {context_id!r} has a document twice; remove one")
        yield Context(context_id, query_id, query, documents)


def iterate_pairs(path: Path) -> Iterator[Pair]:
    """Read pairs one by one; a pair whose chosen grade is not the higher one is an error."""
    for number, row in _rows(path):
        names = [_string(path, number, row, key) for key in ("context_id", "query_id", "chosen", "rejected")]
        grades = [_integer(path, number, row, key) for key in ("chosen_grade", "rejected_grade")]
        if grades[0] <= grades[1]:
            raise InputError(
                f"{path}:{number}: chosen_grade {grades[0]} is not above rejected_grade {grades[1]}; swap the documents"
            )
        yield Pair(names[0], names[1], names[2], names[3], grades[0], grades[1])


def iterate_contexts_with_pairs(directory: Path) -> Iterator[tuple[Context, list[tuple[int, int]]]]:
    """Each context with its pairs as list indices. Both files are read once, side by side: they must be in the same
    order.
    """
    pairs = iterate_pairs(directory / PAIRS_FILE)
    pair, seen = next(pairs, None), set()
    for context in iterate_contexts(directory / CONTEXTS_FILE):
        if context.context_id in seen:
            raise InputError(f"{directory / CONTEXTS_FILE}: context {context.context_id!r} appears twice; remove one")
        # ids alone are remembered, not contexts: a million of them fit into memory
        seen.add(context.context_id)
        places = {document.doc_id: (index, document.grade) for index, document in enumerate(context.documents)}
        chosen = []
        # a merge of two sorted files: neither is ever held whole
        while pair is not None and pair.context_id == context.context_id:
            chosen.append(pair_indices(directory, pair, places))
            pair = next(pairs, None)
        yield context, chosen
    if pair is not None:
        state = "stands after the pairs of a later context" if pair.context_id in seen else f"is not in {CONTEXTS_FILE}"
        raise InputError(
            f"{directory / PAIRS_FILE}: context {pair.context_id!r} {state}; both files need the same order of contexts"
        )


def pair_indices(directory: Path, pair: Pair, places: Mapping[str, tuple[int, int | None]]) -> tuple[int, int]:
    """The pair's places in its context, given as document id -> (place, grade); ids and grades must be the
    context's.
    """
    found = []
    for doc_id, grade in ((pair.chosen, pair.chosen_grade), (pair.rejected, pair.rejected_grade)):
        index, known = places.get(doc_id, (None, None))
        if index is None or known != grade:
            state = "is not in" if index is None else f"has grade {grade} here and {known} in"
            raise InputError(
                f"{directory / PAIRS_FILE}: document {doc_id!r} {state} context {pair.context_id!r}; build both "
                "files together"
            )
        found.append(index)
    return found[0], found[1]


def origin_of_lists(directory: str | Path) -> dict[str, str]:
    """Collection -> how many lists of it a folder holds and who labelled them, as pairs.summary.json says; empty
    without that file.
    """
    path = Path(directory) / SUMMARY_FILE
    summary = read_json(path) if path.is_file() else {}
    if not isinstance(summary, dict):
        return {}
    teachers = {str(one.get("collection")): one.get("teacher") or {} for one in summary.get("labels") or []}
    found = {}
    for one in summary.get("collections") or []:
        name, labels = str(one["name"]), ", judged"
        if name in teachers:
            teacher = (
                teachers[name].get("inputs", {}).get("teacher", {}).get("name")
                or teachers[name].get("tag")
                or "a scored run"
            )
            labels = f", labels of {teacher}"
        found[name] = f"{one['contexts']:,} lists{labels}"
    return found


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in read_lines(path):
        yield number, parse_object(path, number, line)


def _document(path: Path, number: int, row: object) -> ContextDocument:
    if not isinstance(row, dict):
        raise InputError(f"{path}:{number}: a document is {str(row)[:80]!r}, not an object")
    doc_id, title, text = (
        _string(path, number, row, key, may_be_empty=key != "doc_id") for key in ("doc_id", "title", "text")
    )
    grade = None if row.get("grade") is None else _integer(path, number, row, "grade")
    score, source = _score(path, number, row), row.get("grade_from")
    if source is not None and not isinstance(source, str):
        raise InputError(
            f"{path}:{number}: 'grade_from' is {source!r}, not a string; make the file with 'headrank pairs'"
        )
    return ContextDocument(doc_id, title, text, _integer(path, number, row, "rank"), grade, score, source)


def _score(path: Path, number: int, row: Mapping[str, Any]) -> float | None:
    value = row.get("teacher_score")
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(
            f"{path}:{number}: 'teacher_score' is {value!r}, not a finite number; make the file with 'headrank pairs'"
        )
    return float(value)


def _string(path: Path, number: int, row: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InputError(f"{path}:{number}: {key!r} is {value!r}, not a string; make the file with 'headrank pairs'")
    return value


def _integer(path: Path, number: int, row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{path}:{number}: {key!r} is {value!r}, not an integer; make the file with 'headrank pairs'")
    return value
