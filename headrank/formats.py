"""Queries, corpora, judgements and runs on disk: records, readers, writers, and the collection folder.

A *collection* is a folder with queries.tsv, corpus.jsonl (or .jsonl.gz), qrels.txt and run.bm25.txt. Every reader
accepts plain or gzip files, a byte-order mark and Windows line ends, and names file, line, value and remedy when a
line is wrong. Every writer goes through ``atomic_write``: a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrank.errors import InputError

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


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside ``path`` and rename it into place on success; on failure leave nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": "\n"})) as stream:
            yield stream
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    """The process's umask; mkstemp ignores it and would leave every file private."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a plain or gzip text file, skipping blank lines."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the path")
    number = 0
    try:
        opened = gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb")
        with opened as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except (EOFError, OSError) as error:
        raise InputError(f"{path}:{number + 1}: cannot be read ({error}); is the file complete?") from error


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def read_queries(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read queries.tsv (query id, tab, text) in file order; an empty text or a repeated id is an error."""
    queries: dict[str, str] = {}
    for number, line in read_lines(path):
        query_id, tab, text = line.partition("\t")
        query_id, text = query_id.strip(), text.strip()
        if not tab or not query_id or not text:
            raise InputError(f"{path}:{number}: expected 'query id<TAB>text', found {_shown(line)}")
        if query_id in queries:
            raise InputError(f"{path}:{number}: query id {query_id!r} appears twice; remove one line")
        queries[query_id] = text
    if not queries:
        raise InputError(f"{path}: no queries; the file is empty")
    return queries


def iterate_corpus(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Yield the documents of a corpus.jsonl(.gz): objects with docid (or _id, id), text (or contents), title."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno}): {_shown(line)}") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected a JSON object, found {_shown(line)}")
        doc_id = next((row[key] for key in ("docid", "_id", "id") if key in row), None)
        text = next((row[key] for key in ("text", "contents") if key in row), None)
        title = row.get("title") or ""
        if isinstance(doc_id, int) and not isinstance(doc_id, bool):
            doc_id = str(doc_id)
        if not isinstance(doc_id, str) or not doc_id or any(char.isspace() for char in doc_id):
            raise InputError(f"{path}:{number}: needs a 'docid' without spaces, found {_shown(line)}")
        if not isinstance(text, str) or not isinstance(title, str):
            raise InputError(f"{path}:{number}: document {doc_id!r} needs a 'text' string, found {_shown(line)}")
        yield Document(doc_id, title, text)


def read_corpus(path: str | os.PathLike[str], wanted: set[str] | None = None) -> dict[str, Document]:
    """Read a corpus, keeping only the ids in ``wanted`` when given; a repeated id is an error."""
    corpus: dict[str, Document] = {}
    for document in iterate_corpus(path):
        if wanted is not None and document.doc_id not in wanted:
            continue
        if document.doc_id in corpus:
            raise InputError(f"{path}: document id {document.doc_id!r} appears twice; remove one")
        corpus[document.doc_id] = document
    return corpus


def read_qrels(path: str | os.PathLike[str]) -> Qrels:
    """Read TREC judgements (query id, 0, document id, integer grade)."""
    qrels: Qrels = {}
    for number, line in read_lines(path):
        fields = line.split()
        if len(fields) != 4:
            raise InputError(f"{path}:{number}: expected 'query 0 document grade', found {_shown(line)}")
        query_id, _, doc_id, grade = fields
        try:
            value = int(grade)
        except ValueError:
            raise InputError(f"{path}:{number}: grade {grade!r} is not an integer") from None
        judged = qrels.setdefault(query_id, {})
        if judged.setdefault(doc_id, value) != value:
            raise InputError(f"{path}:{number}: document {doc_id!r} of query {query_id!r} has two grades, {judged[doc_id]} and {value}")
    if not qrels:
        raise InputError(f"{path}: no judgements; the file is empty")
    return qrels


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a TREC run (query id, Q0, document id, rank, score, tag); candidates come back ordered by rank.

    File order decides between equal ranks, so a run written by another tool keeps its order for tied scores.
    """
    run: Run = {}
    seen: set[tuple[str, str]] = set()
    for number, line in read_lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise InputError(f"{path}:{number}: expected 'query Q0 document rank score tag', found {_shown(line)}")
        query_id, _, doc_id, rank, score, _ = fields
        try:
            candidate = Candidate(doc_id, int(rank), float(score))
        except ValueError:
            raise InputError(f"{path}:{number}: rank {rank!r} or score {score!r} is not a number") from None
        if not math.isfinite(candidate.score):
            raise InputError(f"{path}:{number}: score {score!r} is not finite")
        if (query_id, doc_id) in seen:
            raise InputError(f"{path}:{number}: document {doc_id!r} of query {query_id!r} appears twice; remove one line")
        seen.add((query_id, doc_id))
        run.setdefault(query_id, []).append(candidate)
    if not run:
        raise InputError(f"{path}: no results; the file is empty")
    return {query_id: sorted(rows, key=lambda row: row.rank) for query_id, rows in run.items()}


def write_run(path: str | os.PathLike[str], run: Mapping[str, Sequence[tuple[str, float]]], tag: str) -> None:
    """Write a TREC run from (document id, score) lists, best first; scores as %.9g, which round-trips float32."""
    with atomic_write(path) as stream:
        for query_id, rows in run.items():
            for rank, (doc_id, score) in enumerate(rows, start=1):
                stream.write(f"{query_id} Q0 {doc_id} {rank} {score:.9g} {tag}\n")


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping]) -> None:
    """Write one JSON object a line, keys in the given order."""
    with atomic_write(path) as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write one indented JSON document that ends with a newline."""
    with atomic_write(path) as stream:
        stream.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> object:
    """Read one JSON document; a missing or broken file is an InputError."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the path")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a JSON file ({error})") from error


def _shown(line: str, limit: int = 80) -> str:
    return repr(line if len(line) <= limit else line[:limit] + "…")


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
        """Find the files of ``folder``; any single file given by name replaces the folder's."""
        root = Path(folder) if folder is not None else None
        if root is not None and not root.is_dir():
            raise InputError(f"{root}: no such collection folder; it needs queries.tsv and corpus.jsonl")

        def locate(given: str | None, *names: str) -> Path | None:
            if given is not None:
                return Path(given)
            return next((root / name for name in names if root is not None and (root / name).is_file()), None)

        queries_path = locate(queries, "queries.tsv")
        corpus_path = locate(corpus, "corpus.jsonl", "corpus.jsonl.gz")
        if queries_path is None or corpus_path is None:
            missing = "queries.tsv" if queries_path is None else "corpus.jsonl (or corpus.jsonl.gz)"
            raise InputError(f"{root or 'collection'}: {missing} is missing; give --collection DIR or the single files")
        name = root.resolve().name if root is not None else queries_path.stem
        return cls(name, queries_path, corpus_path, locate(qrels, "qrels.txt"), locate(run, "run.bm25.txt"))

    def queries(self) -> dict[str, str]:
        """Query id -> text."""
        return read_queries(self.queries_path)

    def qrels(self) -> Qrels:
        """Query id -> document id -> grade."""
        if self.qrels_path is None:
            raise InputError(f"collection {self.name}: qrels.txt is missing; give --qrels FILE")
        return read_qrels(self.qrels_path)

    def run(self) -> Run:
        """The first-stage candidates."""
        if self.run_path is None:
            raise InputError(f"collection {self.name}: run.bm25.txt is missing; make it with 'headrank retrieve' or give --run FILE")
        return read_run(self.run_path)

    def documents(self, wanted: set[str] | None = None) -> dict[str, Document]:
        """The corpus, or the part of it that ``wanted`` names; an id that is not there is an error."""
        corpus = read_corpus(self.corpus_path, wanted)
        missing = sorted(wanted - corpus.keys()) if wanted is not None else []
        if missing:
            raise InputError(f"{self.corpus_path}: {len(missing)} documents of the run are missing, the first is {missing[0]!r}")
        return corpus
