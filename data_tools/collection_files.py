"""Writing a collection folder: queries.tsv, corpus.jsonl, qrels.txt and run.bm25.txt together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrank.artifacts import atomic_folder
from headrank.errors import InputError
from headrank.files import require_writable
from headrank.formats import Document, Qrels, atomic_write, write_json, write_jsonl, write_run

FACTS_FILE = "benchmark.json"


def require_free(folder: Path, overwrite: bool = False) -> None:
    """Fail before any work when ``write_collection`` could not write ``folder``."""
    is_there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_there and not (overwrite and (folder / FACTS_FILE).is_file()):
        raise InputError(f"{folder}: already exists; remove it or choose another folder")
    require_writable(folder)


def write_collection(
    folder: Path,
    queries: Mapping[str, str],
    documents: Mapping[str, Document],
    qrels: Qrels,
    run: Mapping[str, Sequence[tuple[str, float]]],
    *,
    tag: str = "bm25",
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a new collection; the folder appears whole or not at all.

    One that has files is left alone unless ``overwrite`` and it was made here (it has the benchmark.json that ``facts``
    become). Judgements of queries that are not in ``queries`` are left out.
    """
    require_free(folder, overwrite)
    with atomic_folder(folder) as made:
        with atomic_write(made / "queries.tsv") as stream:
            stream.writelines(f"{query_id}\t{text}\n" for query_id, text in queries.items())
        rows = (
            {"docid": document.doc_id, "title": document.title, "text": document.text}
            for document in documents.values()
        )
        write_jsonl(made / "corpus.jsonl", rows)
        with atomic_write(made / "qrels.txt") as stream:
            for query_id in queries:
                stream.writelines(
                    f"{query_id} 0 {doc_id} {grade}\n" for doc_id, grade in qrels.get(query_id, {}).items()
                )
        write_run(made / "run.bm25.txt", run, tag)
        if facts is not None:
            write_json(made / FACTS_FILE, facts)
