"""Pyserini behind one function: Lucene's BM25 from a local or a prebuilt index, for those who have Java and the
network.

Pyserini is an extra (pip install 'headrank[lucene]') and is imported in ``load_pyserini`` alone, which says in one line
what is missing: the package, Java, or the right Java.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.retrieve import K1, B, RankedList, strictly_decreasing
from headrank.errors import InputError
from headrank.files import parse_object
from headrank.formats import Document, Qrels, read_qrels

REQUIRED_JAVA = 21  # of Pyserini 1.x
_TEXT_KEYS = ("text", "contents", "passage", "segment", "body")


@dataclass(frozen=True)
class PyseriniResult:
    """A run with the texts of everything in it."""

    run: dict[str, RankedList]
    documents: dict[str, Document]


def load_pyserini(module: str) -> Any:
    """Import a module of Pyserini, or raise an InputError that names what is missing."""
    _check_java()
    os.environ.setdefault("OPENAI_API_KEY", "unused")  # importing Pyserini asks for one, searching does not
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "pyserini":
            raise InputError(
                "engine pyserini: the package is not installed; pip install 'headrank[lucene]' or use `engine` bm25s"
            ) from error
        raise InputError(
            f"engine pyserini: its dependency {error.name!r} is missing; pip install {error.name}"
        ) from error
    except Exception as error:
        raise _java_problem(error, "Java could not be started; check JAVA_HOME or use `engine` bm25s") from error


def _java_problem(error: Exception, words: str) -> Exception:
    """An InputError with these words for what Java or the network raise; any other error comes back as it is."""
    is_java = type(error).__module__.split(".")[0] == "jnius"
    if not is_java and not isinstance(error, (OSError, ValueError)):
        return error
    first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return InputError(f"engine pyserini: {words} ({first_line})")


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on the PATH"
        raise InputError(
            f"engine pyserini: {where}; install Java {REQUIRED_JAVA} (or set JAVA_HOME), or use `engine` bm25s"
        )
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if found is None or int(found[1]) < REQUIRED_JAVA:
        version = found[1] if found else "of unknown version"
        raise InputError(
            f"engine pyserini: {java} is Java {version}, Pyserini needs {REQUIRED_JAVA}; set JAVA_HOME, or use "
            "`engine` bm25s"
        )


def open_index(index: str) -> Any:
    """A Lucene searcher over a local index folder or a prebuilt index by name (downloaded on first use)."""
    lucene = load_pyserini("pyserini.search.lucene")
    if Path(index).is_dir():
        return lucene.LuceneSearcher(index)
    try:
        searcher = lucene.LuceneSearcher.from_prebuilt_index(index)
    except Exception as error:
        raise _java_problem(error, f"`index` {index} cannot be opened") from error
    if searcher is None:
        raise InputError(
            f"`index` {index}: not a folder, and no prebuilt index of that name could be downloaded; see Pyserini's "
            "lines above"
        )
    return searcher


def search_pyserini(
    index: str,
    queries: Mapping[str, str],
    top_k: int,
    *,
    k1: float = K1,
    b: float = B,
    threads: int = 4,
    with_text: bool = True,
) -> PyseriniResult:
    """Search all queries; with ``with_text`` also fetch the stored text of every document found."""
    searcher = open_index(index)
    searcher.set_bm25(k1, b)
    hits = searcher.batch_search(list(queries.values()), list(queries), k=top_k, threads=threads)
    run = {
        query_id: strictly_decreasing([(hit.docid, float(hit.score)) for hit in hits.get(query_id, [])])
        for query_id in queries
    }
    run = {query_id: ranked for query_id, ranked in run.items() if ranked}
    wanted = sorted({doc_id for ranked in run.values() for doc_id, _ in ranked}) if with_text else []
    return PyseriniResult(run, {doc_id: _stored_document(searcher, index, doc_id) for doc_id in wanted})


def _stored_document(searcher: Any, index: str, doc_id: str) -> Document:
    stored = searcher.doc(doc_id)
    raw = stored.raw() if stored is not None else None
    if raw is None:
        raise InputError(f"`index` {index}: document {doc_id!r} has no stored text; use an index with raw documents")
    row = parse_object(f"index {index}, document {doc_id}", 1, raw) if raw.lstrip().startswith("{") else {"text": raw}
    text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
    if text is None:
        raise InputError(
            f"`index` {index}: document {doc_id!r} has none of the fields {', '.join(_TEXT_KEYS)}: "
            f"{json.dumps(row)[:80]}"
        )
    return Document(doc_id, str(row.get("title") or ""), text)


def load_topics(name: str) -> dict[str, str]:
    """The queries that Pyserini knows under ``name`` (dl21, beir-v1.0.0-fiqa-test, ...)."""
    search = load_pyserini("pyserini.search")
    try:
        topics = search.get_topics(name)
    except Exception as error:
        raise _java_problem(error, f"no topics {name!r} to be had; is there a network?") from error
    return {str(query_id): " ".join(fields["title"].split()) for query_id, fields in topics.items()}


def load_qrels(name: str) -> Qrels:
    """The judgements that Pyserini knows under ``name``."""
    search = load_pyserini("pyserini.search")
    try:
        path = search.get_qrels_file(name)
    except Exception as error:
        raise _java_problem(error, f"no qrels {name!r} to be had; is there a network?") from error
    return read_qrels(path)
