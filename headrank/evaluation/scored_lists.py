"""The scores of one list per line, as ``headrank rerank --scores`` writes them: what the analyses of the paper are
computed from.

A line of scores.jsonl has ``query_id``, ``doc_ids`` in retriever order, ``scores``, ``ranks`` (the retriever's),
``seconds``, ``tokens``, ``is_shortened``; and, where known, ``positions`` (1-based places in the prompt) and ``grades``
(null where not judged).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrank.errors import InputError
from headrank.formats import Qrels, read_lines


@dataclass(frozen=True)
class QueryScores:
    """The scores of one list in retriever order; ``grades`` holds None where a document was not judged."""

    query_id: str
    doc_ids: tuple[str, ...]
    scores: tuple[float, ...]
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    grades: tuple[int | None, ...] | None
    seconds: float
    tokens: int
    is_shortened: bool

    def to_dict(self) -> dict[str, Any]:
        """The line of scores.jsonl."""
        row: dict[str, Any] = {
            "query_id": self.query_id,
            "doc_ids": list(self.doc_ids),
            "scores": list(self.scores),
            "ranks": list(self.ranks),
        }
        row |= {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "is_shortened": self.is_shortened,
            "positions": list(self.positions),
        }
        return row | ({} if self.grades is None else {"grades": list(self.grades)})

    def new_ranks(self) -> list[int]:
        """1-based ranks after reranking, in the order of ``doc_ids``; equal scores keep the retriever's order."""
        order = sorted(range(len(self.scores)), key=lambda index: (-self.scores[index], self.ranks[index]))
        ranks = [0] * len(order)
        for place, index in enumerate(order, start=1):
            ranks[index] = place
        return ranks


def parse_scores(row: Mapping[str, Any], where: str) -> QueryScores:
    """Check one line of scores.jsonl; ``where`` names it in errors."""
    try:
        doc_ids, scores, ranks = (
            tuple(map(str, row["doc_ids"])),
            tuple(map(float, row["scores"])),
            tuple(map(int, row["ranks"])),
        )
        positions = tuple(map(int, row.get("positions") or ranks))
        grades = (
            None
            if row.get("grades") is None
            else tuple(None if grade is None else int(grade) for grade in row["grades"])
        )
        result = QueryScores(
            str(row["query_id"]),
            doc_ids,
            scores,
            ranks,
            positions,
            grades,
            float(row.get("seconds", 0.0)),
            int(row.get("tokens", 0)),
            bool(row.get("is_shortened", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: not a line of scores.jsonl ({type(error).__name__}: {error})") from None
    lengths = {len(doc_ids), len(scores), len(ranks), len(positions), len(grades if grades is not None else doc_ids)}
    if len(lengths) != 1 or not all(map(math.isfinite, scores)):
        raise InputError(
            f"{where}: query {result.query_id!r} needs as many finite scores, ranks and grades as it has documents"
        )
    return result


def read_scores(path: str | os.PathLike[str]) -> list[QueryScores]:
    """Read scores.jsonl; a broken line is named."""
    rows, seen = [], set()
    for number, line in read_lines(path):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg})") from None
        if not isinstance(value, dict):
            raise InputError(f"{path}:{number}: expected a JSON object")
        rows.append(parse_scores(value, f"{path}:{number}"))
        if rows[-1].query_id in seen:
            raise InputError(f"{path}:{number}: query {rows[-1].query_id!r} appears twice")
        seen.add(rows[-1].query_id)
    return rows


def with_grades(rows: Iterable[QueryScores], qrels: Qrels) -> list[QueryScores]:
    """The same lists with their judgements; queries that nobody judged are left out."""
    return [
        replace(row, grades=tuple(qrels[row.query_id].get(doc_id) for doc_id in row.doc_ids))
        for row in rows
        if row.query_id in qrels
    ]
