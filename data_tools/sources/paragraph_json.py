"""Questions with labelled paragraphs in one JSON file: HippoRAG's and ICR's multi-hop sets, HotpotQA's own layout,
CoRe's and QR's lists.

A file is a list of objects with `question` and one of

  paragraphs        objects with paragraph_text (or text), a title, and is_supporting or is_gold; or is_positive and
                    is_negative (CoRe)
  context           [title, [sentence, ...]] pairs, with the titles of supporting_facts (HotpotQA, 2WikiMultihopQA)

ICR's files hold the ColBERTv2 candidates themselves, and num_gold_docs counts supporting passages that are not among
them. HippoRAG's hold the gold and distractor paragraphs of each question; candidates come from the corpus beside it,
NAME_corpus.json. A question is known by its place in the file, from 0, as in ICR's outputs and ColBERT's query files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import quote, read_json
from headrank.formats import Document

_LABELS = ("is_supporting", "is supporting", "is_gold")


@dataclass(frozen=True)
class Paragraph:
    """One passage of a question; the grade is 1, 0, or None where the file says neither."""

    title: str
    text: str
    grade: int | None

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same passage elsewhere: title and text, white space aside."""
        return " ".join(self.title.split()), " ".join(self.text.split())


@dataclass(frozen=True)
class Question:
    """``num_gold`` is what the file says about it, None where it says nothing."""

    query_id: str
    text: str
    paragraphs: tuple[Paragraph, ...]
    num_gold: int | None = None
    is_matched_by_title: bool = False  # HotpotQA's layout names gold by title

    @property
    def gold(self) -> list[Paragraph]:
        """The supporting paragraphs that the file has."""
        return [paragraph for paragraph in self.paragraphs if paragraph.grade]


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a file; every violation names the file and the question's place."""
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise InputError(
            f"{path}: not a list of questions; expected objects with 'question' and 'paragraphs' or 'context'"
        )
    return [_question(f"{path}: question {place}", str(place), row) for place, row in enumerate(rows)]


def read_passages(path: str | Path) -> list[Document]:
    """HippoRAG's corpus: objects with title and text, or title -> sentences; a document is known by its place, as
    ColBERT counts.
    """
    rows = read_json(path)
    pairs: Iterator[tuple[Any, Any]]
    if isinstance(rows, dict):
        pairs = iter(rows.items())
    elif isinstance(rows, list):
        pairs = (
            (row.get("title", ""), row.get("text", row.get("paragraph_text"))) if isinstance(row, dict) else ("", row)
            for row in rows
        )
    else:
        raise InputError(
            f"{path}: not a corpus; expected objects with 'title' and 'text', or an object of titles with their "
            "sentences"
        )
    documents = []
    for place, (title, text) in enumerate(pairs):
        body = _joined(text)
        if not isinstance(title, str) or body is None:
            raise InputError(
                f"{path}: passage {place}: needs a 'title' and a 'text', found {quote(str((title, text)))}"
            )
        documents.append(Document(str(place), title, body))
    if not documents:
        raise InputError(f"{path}: no passages; the file is empty")
    return documents


def corpus_beside(path: Path) -> Path:
    """NAME_corpus.json beside NAME.json."""
    return path.with_name(f"{path.stem}_corpus{path.suffix}")


def read_ranking(path: Path, num_queries: int) -> dict[str, list[tuple[str, float]]]:
    """ColBERT's ranking file: question number, passage number, rank and, mostly, a score, between tabs; best first."""
    found: dict[str, list[tuple[int, str, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) not in (3, 4) or not all(re.fullmatch(r"\d{1,9}", field) for field in fields[:3]):
            raise InputError(
                f"{path}:{number}: expected 'question<TAB>passage<TAB>rank[<TAB>score]' in numbers, found {quote(line)}"
            )
        if int(fields[0]) >= num_queries:
            raise InputError(
                f"{path}:{number}: question {fields[0]} is not among the {num_queries} of the file; they are "
                "counted from 0"
            )
        found.setdefault(str(int(fields[0])), []).append((int(fields[2]), str(int(fields[1])), -float(fields[2])))
    return {query_id: [(doc_id, score) for _, doc_id, score in sorted(rows)] for query_id, rows in found.items()}


def _question(where: str, query_id: str, row: Any) -> Question:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: not an object, found {quote(str(row))}")
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: needs a 'question', found {quote(str(text))}")
    query = " ".join(text.split())
    if isinstance(row.get("paragraphs"), list) and row["paragraphs"]:
        paragraphs = tuple(
            _paragraph(f"{where}, paragraph {place}", each) for place, each in enumerate(row["paragraphs"])
        )
        num_gold = row.get("num_gold_docs")
        if num_gold is not None and (type(num_gold) is not int or num_gold < 0):
            raise InputError(f"{where}: 'num_gold_docs' must be a whole number, found {quote(str(num_gold))}")
        return Question(query_id, query, paragraphs, num_gold)
    if isinstance(row.get("context"), list) and isinstance(row.get("supporting_facts"), list):
        return Question(
            query_id, query, _context(where, row["context"], row["supporting_facts"]), is_matched_by_title=True
        )
    raise InputError(f"{where}: has neither 'paragraphs' nor 'context' with 'supporting_facts'")


def _paragraph(where: str, row: Any) -> Paragraph:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: not an object, found {quote(str(row))}")
    title, text = row.get("title") or "", row.get("paragraph_text", row.get("text"))
    if not isinstance(title, str) or not isinstance(text, str):
        raise InputError(
            f"{where}: needs a 'paragraph_text' (or 'text') and, if any, a 'title', found {quote(str(row))}"
        )
    return Paragraph(title, text, _grade(where, row))


def _grade(where: str, row: Mapping[str, Any]) -> int | None:
    """CoRe's lists mark positives and hard negatives and leave the others open; all other files mark every
    paragraph.
    """
    if "is_positive" in row or "is_negative" in row:
        return 1 if row.get("is_positive") else 0 if row.get("is_negative") else None
    label = next((row[name] for name in _LABELS if name in row), None)
    if not isinstance(label, bool):
        names = "is_supporting (or is_gold, or is_positive and is_negative)"
        raise InputError(f"{where}: needs {names}, true or false, found {quote(str(label))}")
    return int(label)


def _context(where: str, context: list[Any], facts: list[Any]) -> tuple[Paragraph, ...]:
    if not all(isinstance(fact, list) and fact and isinstance(fact[0], str) for fact in facts):
        raise InputError(f"{where}: 'supporting_facts' must be [title, sentence] pairs, found {quote(str(facts))}")
    gold = {fact[0] for fact in facts}
    paragraphs = []
    for pair in context:
        body = _joined(pair[1]) if isinstance(pair, list) and len(pair) == 2 else None
        if body is None or not isinstance(pair[0], str):
            raise InputError(f"{where}: 'context' must be [title, sentences] pairs, found {quote(str(pair))}")
        paragraphs.append(Paragraph(pair[0], body, int(pair[0] in gold)))
    return tuple(paragraphs)


def _joined(text: Any) -> str | None:
    """Sentences joined as HippoRAG joins them; None for what is no text."""
    if isinstance(text, str):
        return text
    return "".join(text) if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text) else None
