"""Queries, corpora, judgements and runs on disk: records, readers, writers, and the collection folder.

A *collection* is a folder with queries.tsv, corpus.jsonl (or .jsonl.gz), qrels.txt and run.bm25.txt. Every reader
accepts plain or gzip files, a byte-order mark and Windows line ends, and names file, line, value and remedy when a line
is wrong. Every writer goes through ``atomic_write``: a reader never sees half a file. The functions on files as such
come from headrank.files and are offered here too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrank.errors import InputError
from headrank.files import atomic_write, parse_object, quote, read_json, read_lines, write_json, write_jsonl

__all__ = [
    "Candidate",
    "Collection",
    "Document",
    "Qrels",
    "Run",
    "atomic_write",
    "iterate_corpus",
    "read_corpus",
    "read_json",
    "read_lines",
    "read_qrels",
    "read_queries",
    "read_run",
    "write_json",
    "write_jsonl",
    "write_run",
]

_LARGEST_GRADE = 2**31 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")

Qrels = dict[str, dict[str, int]]  # query id -> document id -> grade


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of the corpus; the title may be empty."""

    doc_id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One retrieved passage of one query: 1-based rank and the retriever's score."""

    doc_id: str
    rank: int
    score: float


Run = dict[str, list[Candidate]]  # query id -> candidates, best first


def read_queries(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read queries.tsv (query id, tab, text) in file order; an empty text or a repeated id is an error."""
    queries: dict[str, str] = {}
    for number, line in read_lines(path):
        # old Mac line ends make one line of the whole file, and its tab a query that holds all others
        if "\r" in line:
            raise InputError(f"{path}:{number}: a carriage return within {quote(line)}; convert the line ends to \\n")
        query_id, tab, text = line.partition("\t")
        query_id, text = query_id.strip(), text.strip()
        if not tab or not query_id or not text:
            raise InputError(f"{path}:{number}: expected 'query id<TAB>text', found {quote(line)}")
        if query_id.split() != [query_id]:
            raise InputError(
                f"{path}:{number}: query id {query_id!r} has a space, which TREC files cannot hold; rename it"
            )
        if query_id in queries:
            raise InputError(f"{path}:{number}: query id {query_id!r} appears twice; remove one line")
        queries[query_id] = text
    if not queries:
        raise InputError(f"{path}: no queries; the file is empty")
    return queries


def read_query_ids(path: str | os.PathLike[str]) -> set[str]:
    """Query ids, one per line (or the first column)."""
    ids = {line.split()[0] for _, line in read_lines(path)}
    if not ids:
        raise InputError(f"{path}: no query ids; the file is empty")
    return ids


def iterate_corpus(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Yield the documents of a corpus.jsonl(.gz): objects with docid (or _id, id), text (or contents), title; ids
    appear once.
    """
    seen: set[str] = set()
    for number, document in _numbered_documents(path):
        if document.doc_id in seen:
            raise InputError(f"{path}:{number}: document id {document.doc_id!r} appears twice; remove one line")
        seen.add(document.doc_id)
        yield document


def _numbered_documents(path: str | os.PathLike[str]) -> Iterator[tuple[int, Document]]:
    number = 0
    for number, line in read_lines(path):
        row = parse_object(path, number, line)
        doc_id = next((row[key] for key in ("docid", "_id", "id") if key in row), None)
        text = next((row[key] for key in ("text", "contents") if key in row), None)
        title = row.get("title") or ""
        # bool is an int in Python: "docid": true would become the id "True"
        if isinstance(doc_id, int) and not isinstance(doc_id, bool):
            doc_id = str(doc_id)
        if not isinstance(doc_id, str) or doc_id.split() != [doc_id]:
            raise InputError(f"{path}:{number}: needs a 'docid' without spaces, found {quote(line)}")
        if not isinstance(text, str) or not isinstance(title, str):
            raise InputError(
                f"{path}:{number}: document {doc_id!r} needs a 'text' string and, if any, a 'title' string, found "
                f"{quote(line)}"
            )
        yield number, Document(doc_id, title, text)
    if not number:
        raise InputError(f"{path}: no documents; the file is empty")


def read_corpus(path: str | os.PathLike[str], wanted: set[str] | None = None) -> dict[str, Document]:
    """Read a corpus, keeping only the ids in ``wanted`` when given; a repeated id is an error."""
    corpus: dict[str, Document] = {}
    for number, document in _numbered_documents(path):
        if wanted is not None and document.doc_id not in wanted:
            continue
        if document.doc_id in corpus:
            raise InputError(f"{path}:{number}: document id {document.doc_id!r} appears twice; remove one line")
        corpus[document.doc_id] = document
    return corpus


def read_qrels(path: str | os.PathLike[str]) -> Qrels:
    """Read TREC judgements (query id, 0, document id, integer grade); a line that only repeats another is harmless."""
    qrels: Qrels = {}
    for number, line in read_lines(path):
        fields = line.split()
        if len(fields) != 4:
            raise InputError(
                f"{path}:{number}: expected 'query 0 document grade', found {quote(line)}; correct the line"
            )
        query_id, _, doc_id, grade = fields
        if not _INTEGER.fullmatch(grade) or abs(int(grade)) > _LARGEST_GRADE:
            raise InputError(f"{path}:{number}: grade {quote(grade)} is not an integer; correct the line")
        value = int(grade)
        judged = qrels.setdefault(query_id, {})
        # pooled collections repeat lines; two different grades are somebody's mistake, and the last one must not win
        # silently
        if judged.setdefault(doc_id, value) != value:
            raise InputError(
                f"{path}:{number}: document {doc_id!r} of query {query_id!r} has two grades, {judged[doc_id]} and "
                f"{value}; remove one"
            )
    if not qrels:
        raise InputError(f"{path}: no judgements; the file is empty")
    return qrels


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a TREC run (query id, Q0, document id, rank, score, tag); candidates come back ordered by rank and numbered
    from 1.

    File order decides between equal ranks, so a run written by another tool keeps its order for tied scores.
    """
    run: Run = {}
    seen: set[tuple[str, str]] = set()
    for number, line in read_lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise InputError(
                f"{path}:{number}: expected 'query Q0 document rank score tag', found {quote(line)}; correct the line"
            )
        query_id, _, doc_id, rank, score, _ = fields
        candidate = Candidate(doc_id, *_rank_and_score(path, number, rank, score))
        if (query_id, doc_id) in seen:
            raise InputError(
                f"{path}:{number}: document {doc_id!r} of query {query_id!r} appears twice; remove one line"
            )
        seen.add((query_id, doc_id))
        run.setdefault(query_id, []).append(candidate)
    if not run:
        raise InputError(f"{path}: no results; the file is empty")
    # by rank and not by score: trec_eval would break ties of scores by document id; the sort is stable, so file order
    # decides
    return {query_id: _numbered(sorted(rows, key=lambda row: row.rank)) for query_id, rows in run.items()}


def _numbered(rows: Sequence[Candidate]) -> list[Candidate]:
    """Ranks 1, 2, ...: other tools begin at 0, leave gaps or write one rank for all."""
    return [
        row if row.rank == rank else Candidate(row.doc_id, rank, row.score) for rank, row in enumerate(rows, start=1)
    ]


def _rank_and_score(path: str | os.PathLike[str], number: int, rank: str, score: str) -> tuple[int, float]:
    # int() would take "1_0" and digits of other scripts
    if not _INTEGER.fullmatch(rank):
        raise InputError(
            f"{path}:{number}: rank {quote(rank)} is not an integer; are the columns 'query Q0 document rank score "
            "tag'?"
        )
    try:
        # float() takes 1_000, which no other tool of the field reads as a number
        value = float(score) if "_" not in score else math.nan
    except ValueError:
        raise InputError(f"{path}:{number}: score {quote(score)} is not a number; correct the line") from None
    if not math.isfinite(value):
        raise InputError(f"{path}:{number}: score {quote(score)} is not a finite number; correct the line")
    return int(rank), value


def write_run(
    path: str | os.PathLike[str],
    run: Mapping[str, Sequence[tuple[str, float]]] | Iterable[tuple[str, Sequence[tuple[str, float]]]],
    tag: str,
) -> None:
    """Write a TREC run from (document id, score) lists, best first; scores as %.9g, which round-trips float32."""
    with atomic_write(path) as stream:
        for query_id, rows in run.items() if isinstance(run, Mapping) else run:
            for rank, (doc_id, score) in enumerate(rows, start=1):
                stream.write(f"{query_id} Q0 {doc_id} {rank} {score:.9g} {tag}\n")


def append_unranked(ranked: Sequence[tuple[str, float]], rest: Iterable[str]) -> list[tuple[str, float]]:
    """A reranked list, best first, and below it the candidates that were not read: in their own order, each 1 below
    the one before.
    """
    # below the last score, and falling: tools that sort by score keep this order
    floor = ranked[-1][1]
    return [*ranked, *((doc_id, floor - 1.0 - place) for place, doc_id in enumerate(rest))]


@dataclass(frozen=True)
class Collection:
    """The paths of one collection; files are read when asked for."""

    name: str
    queries_path: Path
    corpus_path: Path
    qrels_path: Path | None
    run_path: Path | None

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str] | None = None,
        *,
        queries: str | None = None,
        corpus: str | None = None,
        qrels: str | None = None,
        run: str | None = None,
    ) -> Collection:
        """Find the files of ``folder``, gzipped or not; any single file given by name replaces the folder's."""
        root = Path(folder) if folder is not None else None
        if root is not None and not root.is_dir():
            raise InputError(f"{root}: no such collection folder; it needs queries.tsv and corpus.jsonl")

        def locate(given: str | None, *names: str) -> Path | None:
            if given is not None:
                return Path(given)
            # the plain file first: unpacking a .gz and editing it must not leave the old one in use
            spelled = [name + ending for name in names for ending in ("", ".gz")]
            return next((root / name for name in spelled if root is not None and (root / name).is_file()), None)

        queries_path = locate(queries, "queries.tsv")
        corpus_path = locate(corpus, "corpus.jsonl")
        if queries_path is None or corpus_path is None:
            missing = "queries.tsv" if queries_path is None else "corpus.jsonl (or corpus.jsonl.gz)"
            remedy = "give --collection DIR or the single files"
            raise InputError(f"{root}: {missing} is missing; {remedy}" if root else f"no {missing}; {remedy}")
        name = root.resolve().name if root is not None else queries_path.stem
        return cls(name, queries_path, corpus_path, locate(qrels, "qrels.txt"), locate(run, "run.bm25.txt"))

    @property
    def paths(self) -> list[Path]:
        """The files that are there."""
        return [
            path for path in (self.queries_path, self.corpus_path, self.qrels_path, self.run_path) if path is not None
        ]

    def queries(self) -> dict[str, str]:
        """Query id -> text."""
        return read_queries(self.queries_path)

    def qrels(self) -> Qrels:
        """Query id -> document id -> grade."""
        if self.qrels_path is None:
            raise InputError(f"collection {self.name}: qrels.txt is missing; give `qrels` FILE")
        return read_qrels(self.qrels_path)

    def run(self) -> Run:
        """The first-stage candidates."""
        if self.run_path is None:
            raise InputError(
                f"collection {self.name}: run.bm25.txt is missing; make it with 'headrank retrieve' or give `run` FILE"
            )
        return read_run(self.run_path)

    def documents(self, wanted: set[str] | None = None) -> dict[str, Document]:
        """The corpus, or the part of it that ``wanted`` names; an id that is not there is an error."""
        # the whole file is read even for a few ids: a corpus has no index, and duplicates of the wanted ids are found
        # this way
        corpus = read_corpus(self.corpus_path, wanted)
        missing = sorted(wanted - corpus.keys()) if wanted is not None else []
        if missing:
            raise InputError(
                f"{self.corpus_path}: {len(missing)} documents of the run are missing, the first is {missing[0]!r}; "
                "is it the run's corpus?"
            )
        return corpus
