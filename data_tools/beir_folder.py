"""BEIR's layout on disk: queries.jsonl, corpus.jsonl and qrels/test.tsv, as its zip files unpack."""

from __future__ import annotations

from pathlib import Path

from headrank.errors import InputError
from headrank.files import parse_object, read_lines
from headrank.formats import Qrels

TEST_QRELS = Path("qrels") / "test.tsv"


def is_beir_folder(folder: Path) -> bool:
    """Whether the three files of BEIR are there."""
    return all((folder / name).is_file() for name in ("queries.jsonl", "corpus.jsonl", TEST_QRELS))


def read_beir_queries(path: Path) -> dict[str, str]:
    """Query id -> text from queries.jsonl (objects with _id and text), white space collapsed."""
    queries: dict[str, str] = {}
    for number, line in read_lines(path):
        row = parse_object(path, number, line)
        query_id, text = row.get("_id"), row.get("text")
        if not isinstance(query_id, str) or query_id.split() != [query_id] or not isinstance(text, str) or not text.strip():
            raise InputError(f"{path}:{number}: needs an '_id' without spaces and a 'text', found {line[:80]!r}")
        if query_id in queries:
            raise InputError(f"{path}:{number}: query id {query_id!r} appears twice; remove one line")
        queries[query_id] = " ".join(text.split())
    return queries


def read_beir_qrels(path: Path) -> Qrels:
    """Query id -> document id -> grade from a file with the header query-id, corpus-id, score."""
    qrels: Qrels = {}
    for number, line in read_lines(path):
        fields = line.split("\t")
        if number == 1 and fields[-1] == "score":
            continue
        if len(fields) != 3:
            raise InputError(f"{path}:{number}: expected 'query-id<TAB>corpus-id<TAB>score', found {line[:80]!r}")
        try:
            qrels.setdefault(fields[0], {})[fields[1]] = int(fields[2])
        except ValueError:
            raise InputError(f"{path}:{number}: score {fields[2]!r} is not an integer") from None
    if not qrels:
        raise InputError(f"{path}: no judgements; the file is empty")
    return qrels
