"""BEIR's layout on disk: queries.jsonl, corpus.jsonl and qrels/test.tsv, as its zip files unpack; each may be
gzipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrank.errors import InputError
from headrank.files import parse_object, quote, read_lines
from headrank.formats import Qrels

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True)
class BeirFiles:
    """The three files of a test set."""

    queries: Path
    corpus: Path
    qrels: Path


def find_beir_files(folder: Path) -> BeirFiles | None:
    """The three files of BEIR, or None when one is missing."""

    def locate(name: str) -> Path | None:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)

    queries, corpus, qrels = locate("queries.jsonl"), locate("corpus.jsonl"), locate("qrels/test.tsv")
    return None if queries is None or corpus is None or qrels is None else BeirFiles(queries, corpus, qrels)


def read_beir_queries(path: Path) -> dict[str, str]:
    """Query id -> text from queries.jsonl (objects with _id and text), white space collapsed."""
    queries: dict[str, str] = {}
    for number, line in read_lines(path):
        row = parse_object(path, number, line)
        query_id, text = row.get("_id"), row.get("text")
        if isinstance(query_id, int) and not isinstance(query_id, bool):
            query_id = str(query_id)
        if (
            not isinstance(query_id, str)
            or query_id.split() != [query_id]
            or not isinstance(text, str)
            or not text.strip()
        ):
            raise InputError(f"{path}:{number}: needs an '_id' without spaces and a 'text', found {quote(line)}")
        if query_id in queries:
            raise InputError(f"{path}:{number}: query id {query_id!r} appears twice; remove one line")
        queries[query_id] = " ".join(text.split())
    if not queries:
        raise InputError(f"{path}: no queries; the file is empty")
    return queries


def read_beir_qrels(path: Path) -> Qrels:
    """Query id -> document id -> grade from a file with the header query-id, corpus-id, score."""
    qrels: Qrels = {}
    for number, line in read_lines(path):
        fields = line.split()
        # some mirrors have the header, some have not
        if number == 1 and fields[-1] == "score":
            continue
        if len(fields) != 3:
            raise InputError(f"{path}:{number}: expected 'query-id<TAB>corpus-id<TAB>score', found {quote(line)}")
        query_id, doc_id, score = fields
        if not _INTEGER.fullmatch(score):
            raise InputError(f"{path}:{number}: score {quote(score)} is not an integer; correct the line")
        judged = qrels.setdefault(query_id, {})
        if judged.setdefault(doc_id, int(score)) != int(score):
            raise InputError(
                f"{path}:{number}: document {doc_id!r} of query {query_id!r} has two grades, {judged[doc_id]} and "
                f"{score}; remove one"
            )
    if not qrels:
        raise InputError(f"{path}: no judgements; the file is empty")
    return qrels
