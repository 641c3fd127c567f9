"""Public training sets in their own formats, read line by line: each line becomes a query with passages that are good
or bad for it.

- BGE JSONL: {"query", "pos": [text], "neg": [text]}, with "pos_scores" and "neg_scores" of a teacher where they were
  made.
- Tevatron JSONL, which is also RLHN's: {"query_id", "query", "positive_passages": [{"docid", "title", "text"}],
  "negative_passages"}.
- MS MARCO triples, three columns: query, good and bad passage as texts, or as ids of a query file and a passage file.

A mistake is an InputError that names file and line. White space in queries is collapsed: a TREC file holds a query on
one line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import parse_object, quote, read_lines

FORMATS = ("bge", "tevatron", "triples", "id-triples")


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage and what is known of it. Without texts (``text`` None) it is an id that a passage file explains."""

    doc_id: str
    title: str
    text: str | None
    grade: int
    score: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingList:
    """One line: a query, its passages, and where it stands. ``query`` None is an id that a query file explains."""

    query_id: str
    query: str | None
    passages: tuple[Passage, ...]
    place: str  # file:line, for messages about what was read earlier


def format_of(path: str | Path) -> str:
    """The format of a file, by its first line; id triples cannot be told from texts and are asked for by giving
    their files.
    """
    number, line = next(read_lines(path), (0, ""))
    if not number:
        raise InputError(f"{path}: no lists; the file is empty")
    # only the first line is looked at: a file of two formats fails at its line, with its number
    if line.lstrip().startswith("{"):
        keys = parse_object(path, number, line).keys()
        if "positive_passages" in keys:
            return "tevatron"
        if "pos" in keys:
            return "bge"
        raise InputError(
            f"{path}:{number}: neither 'pos' (BGE) nor 'positive_passages' (Tevatron, RLHN) among the fields "
            f"{quote(', '.join(keys))}"
        )
    if line.count("\t") == 2:
        return "triples"
    raise InputError(
        f"{path}:{number}: neither a JSON object (BGE, Tevatron, RLHN) nor three columns (MS MARCO triples), found "
        f"{quote(line)}"
    )


def read_training_lists(path: str | Path, form: str) -> Iterator[TrainingList]:
    """The lists of a file in one of FORMATS, in its order."""
    parse = {"bge": _bge, "tevatron": _tevatron}.get(form)
    for number, line in read_lines(path):
        place = f"{path}:{number}"
        if parse is None:
            yield _triple(line, place, has_texts=form == "triples")
        else:
            yield parse(parse_object(path, number, line), place)


def text_id(*texts: str) -> str:
    """The name of a text that has none: sixteen hex digits of its content."""
    return hashlib.blake2b("\x1f".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _bge(row: dict[str, Any], place: str) -> TrainingList:
    query, passages = _query(row, place), []
    for field, grade in (("pos", 1), ("neg", 0)):
        texts, scores = row.get(field) or [], row.get(f"{field}_scores")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{place}: {field!r} must be a list of texts, found {quote(str(texts))}")
        if scores is not None and (not isinstance(scores, list) or len(scores) != len(texts)):
            found = f"{len(scores)} scores" if isinstance(scores, list) else quote(str(scores))
            raise InputError(
                f"{place}: '{field}_scores' must hold a number for each of the {len(texts)} texts of {field!r}, "
                f"found {found}"
            )
        for text, score in zip(texts, scores or [None] * len(texts), strict=True):
            if text.strip():
                passages.append(Passage(text_id("", text), "", text, grade, _score(score, place)))
    return TrainingList(_id_of(row, ("query_id", "id", "_id"), place) or text_id(query), query, tuple(passages), place)


def _tevatron(row: dict[str, Any], place: str) -> TrainingList:
    query, passages = _query(row, place), []
    for field, grade in (("positive_passages", 1), ("negative_passages", 0)):
        listed = row.get(field) or []
        if not isinstance(listed, list) or not all(isinstance(passage, dict) for passage in listed):
            raise InputError(
                f"{place}: {field!r} must be a list of objects with 'docid' and 'text', found {quote(str(listed))}"
            )
        for passage in listed:
            title, text = passage.get("title") or "", passage.get("text")
            if not isinstance(title, str) or not isinstance(text, str):
                raise InputError(f"{place}: a passage of {field!r} needs a 'text' string, found {quote(str(passage))}")
            if text.strip():
                doc_id = _id_of(passage, ("docid", "doc_id"), place) or text_id(title, text)
                passages.append(Passage(doc_id, title, text, grade, _score(passage.get("score"), place)))
    return TrainingList(_id_of(row, ("query_id", "id"), place) or text_id(query), query, tuple(passages), place)


def _triple(line: str, place: str, *, has_texts: bool) -> TrainingList:
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != 3 or not all(fields):
        raise InputError(f"{place}: expected 'query<TAB>good passage<TAB>bad passage', found {quote(line)}")
    query, good, bad = fields
    if has_texts:
        query = " ".join(query.split())
        passages = [Passage(text_id("", text), "", text, grade) for text, grade in ((good, 1), (bad, 0))]
        return TrainingList(text_id(query), query, tuple(passages), place)
    spaced = next((field for field in fields if field.split() != [field]), None)
    if spaced is not None:
        raise InputError(
            f"{place}: {quote(spaced)} is not an id; leave `queries` and `passages` out for triples of texts"
        )
    return TrainingList(query, None, (Passage(good, "", None, 1), Passage(bad, "", None, 0)), place)


def _query(row: dict[str, Any], place: str) -> str:
    query = row.get("query")
    if not isinstance(query, str) or not query.strip():
        raise InputError(f"{place}: 'query' must be a text, found {quote(str(query))}")
    return " ".join(query.split())


def _id_of(row: dict[str, Any], names: tuple[str, ...], place: str) -> str | None:
    """An id as TREC files can hold it; one with spaces is replaced by sixteen digits of itself."""
    value = next((row[name] for name in names if row.get(name) not in (None, "")), None)
    if value is None:
        return None
    # numbers are common as ids; true is not one
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InputError(f"{place}: the id {quote(str(value))} is neither a text nor a whole number")
    text = str(value)
    return text if text.split() == [text] else text_id(text)


def _score(value: Any, place: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{place}: the score {quote(str(value))} is not a finite number")
    return float(value)


def read_id_texts(path: str | Path) -> Iterator[tuple[str, str, str, str]]:
    """(id, title, text, place) of a query or passage file: 'id<TAB>text', 'id<TAB>text<TAB>title', or JSON objects."""
    for number, line in read_lines(path):
        place = f"{path}:{number}"
        if line.startswith("{"):
            row = parse_object(path, number, line)
            name, title = _id_of(row, ("docid", "pid", "_id", "id", "qid"), place), row.get("title") or ""
            text = next((row[key] for key in ("text", "passage", "contents") if isinstance(row.get(key), str)), "")
        else:
            name, _, rest = line.partition("\t")
            text, _, title = rest.partition("\t")
        if not name or not isinstance(title, str) or not text.strip():
            raise InputError(f"{place}: expected 'id<TAB>text', found {quote(line)}")
        yield name, title, text, place
