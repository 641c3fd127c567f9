"""Training lists gathered on disk: queries, passages and which belong together, in a temporary SQLite file.

A public training set repeats passages and spreads a query over many lines, so that it cannot be written as it is read,
and may be larger than memory. Here every query and passage is stored once; memory is the database's cache, whatever the
size.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_tools.sources.training_lists import Passage, TrainingList
from headrank.errors import InputError

SINGULAR = {"queries": "query", "passages": "passage"}  # the tables that have ids, and what a row is
_CACHE_KIB = 64 * 1024
_TABLES = """
CREATE TABLE queries (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, text TEXT);
CREATE TABLE passages (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT);
CREATE TABLE candidates (query INTEGER, passage INTEGER, grade INTEGER NOT NULL, score REAL,
    PRIMARY KEY (query, passage)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class StoredCandidate:
    """A passage of a query; ``score`` is a teacher's where there is one."""

    doc_id: str
    grade: int
    score: float | None


class ListDatabase:
    """Use as a context manager; ``path`` must not exist yet."""

    def __init__(self, path: Path) -> None:
        # autocommit off without a journal: the file is thrown away when anything goes wrong
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}", "locking_mode=EXCLUSIVE"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.executescript(_TABLES)
        self._connection.execute("BEGIN")
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> ListDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def add(self, listed: TrainingList) -> None:
        """Store one line. A passage that is good on one line and bad on another is good; an id with two texts is
        refused.
        """
        query = self._number_of("queries", listed.query_id, "", listed.query, listed.place)
        for passage in listed.passages:
            number = self._number_of("passages", passage.doc_id, passage.title, passage.text, listed.place)
            self._add_candidate(query, number, passage)
        self.counts["lines"] += 1

    def _number_of(self, table: str, name: str, title: str, text: str | None, place: str) -> int:
        known = self._connection.execute(f"SELECT number, text FROM {table} WHERE id = ?", (name,)).fetchone()
        if known is None:
            values = (name, text) if table == "queries" else (name, text, title)
            columns = "id, text" if table == "queries" else "id, text, title"
            cursor = self._connection.execute(
                f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", values
            )
            self.counts[table] += 1
            return int(cursor.lastrowid or 0)
        if text is not None and known[1] != text:
            raise InputError(
                f"{place}: {SINGULAR[table]} id {name!r} had another text on an earlier line; give `ids_from_text` "
                f"to name {table} anew"
            )
        return int(known[0])

    def _add_candidate(self, query: int, number: int, passage: Passage) -> None:
        known = self._connection.execute(
            "SELECT grade FROM candidates WHERE query = ? AND passage = ?", (query, number)
        ).fetchone()
        if known is not None and known[0] != passage.grade:
            self.counts["good and bad"] += 1
        self._connection.execute(
            "INSERT INTO candidates VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "grade = max(grade, excluded.grade), score = coalesce(score, excluded.score)",
            (query, number, passage.grade, passage.score),
        )

    def explain(self, table: str, name: str, title: str, text: str) -> None:
        """Give the text of a query or passage that came as an id; others are passed over."""
        if table == "queries":
            self._connection.execute("UPDATE queries SET text = ? WHERE id = ?", (" ".join(text.split()), name))
        else:
            self._connection.execute("UPDATE passages SET text = ?, title = ? WHERE id = ?", (text, title, name))

    def first_unexplained(self, table: str) -> str | None:
        """An id that no file gave a text for."""
        found = self._connection.execute(f"SELECT id FROM {table} WHERE text IS NULL LIMIT 1").fetchone()
        return None if found is None else str(found[0])

    def queries(self) -> Iterator[tuple[int, str, str]]:
        """(number, id, text) in the order of their first line."""
        yield from self._connection.execute("SELECT number, id, text FROM queries ORDER BY number")

    def candidates(self, query: int) -> list[StoredCandidate]:
        """The passages of a query in the order in which they were first seen."""
        rows = self._connection.execute(
            "SELECT p.id, c.grade, c.score FROM candidates c JOIN passages p ON p.number = c.passage WHERE c.query "
            "= ? ORDER BY c.passage",
            (query,),
        )
        return [StoredCandidate(*row) for row in rows]

    def start_part(self) -> None:
        """Forget which passages are wanted; see ``want``."""
        self._connection.execute("CREATE TEMP TABLE IF NOT EXISTS wanted (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._connection.execute("DELETE FROM wanted")

    def want(self, doc_ids: list[str]) -> None:
        """Passages to be written with this part."""
        self._connection.executemany("INSERT OR IGNORE INTO wanted VALUES (?)", ((doc_id,) for doc_id in doc_ids))

    def wanted_passages(self) -> Iterator[tuple[str, str, str]]:
        """(id, title, text) of every wanted passage, once, by id."""
        yield from self._connection.execute(
            "SELECT p.id, p.title, p.text FROM wanted w JOIN passages p ON p.id = w.id ORDER BY w.id"
        )
