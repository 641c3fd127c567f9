"""Benchmarks from ir_datasets, for those who have it: queries, judgements and documents by the id of a data set.

The package is an extra (pip install 'headrank[datasets]') and is imported in ``load_dataset`` alone. It downloads a
data set on first use into its own folder ($IR_DATASETS_HOME, else ~/.ir_datasets) and shows the terms of those that
have any.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from headrank.errors import InputError
from headrank.formats import Document, Qrels

PACKAGE = "ir_datasets"


def load_dataset(dataset_id: str) -> Any:
    """A data set with documents, queries and judgements; an InputError says what is missing."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        raise InputError(
            f"`from` {PACKAGE}: the package {error.name!r} is not installed; pip install {error.name}"
        ) from error
    try:
        dataset = package.load(dataset_id)
    except KeyError as error:
        raise InputError(
            f"`from` {PACKAGE}: there is no data set {dataset_id!r}; see https://ir-datasets.com"
        ) from error
    for part in ("docs", "queries", "qrels"):
        if not getattr(dataset, f"has_{part}")():
            raise InputError(
                f"`from` {PACKAGE}: {dataset_id} has no {part}; name one of its subsets, as in beir/fiqa/test"
            )
    return dataset


def read_dataset_queries(dataset: Any, dataset_id: str) -> dict[str, str]:
    """Query id -> text, white space collapsed."""
    queries: dict[str, str] = {}
    for query in _downloaded(dataset.queries_iter(), dataset_id):
        text = " ".join(query.default_text().split())
        if not text:
            raise InputError(f"{PACKAGE} {dataset_id}: query {query.query_id!r} is empty; report it to the project")
        queries[_checked_id(query.query_id, dataset_id)] = text
    return queries


def read_dataset_qrels(dataset: Any, dataset_id: str) -> Qrels:
    """Query id -> document id -> grade; a document with two grades is an error, as in a file."""
    qrels: Qrels = {}
    for row in _downloaded(dataset.qrels_iter(), dataset_id):
        judged = qrels.setdefault(_checked_id(row.query_id, dataset_id), {})
        if judged.setdefault(row.doc_id, int(row.relevance)) != row.relevance:
            raise InputError(
                f"{PACKAGE} {dataset_id}: document {row.doc_id!r} of query {row.query_id!r} has two grades"
            )
    return qrels


def iterate_dataset(dataset: Any, dataset_id: str) -> Iterator[Document]:
    """The documents: title and text where they have a title, else all that their default text holds."""
    for row in _downloaded(dataset.docs_iter(), dataset_id):
        is_plain = isinstance(getattr(row, "text", None), str)
        title = getattr(row, "title", "") if is_plain else ""
        yield Document(_checked_id(row.doc_id, dataset_id), title or "", row.text if is_plain else row.default_text())


def _checked_id(name: str, dataset_id: str) -> str:
    if name.split() != [name]:
        raise InputError(f"{PACKAGE} {dataset_id}: id {name!r} has a space, which TREC files cannot hold")
    return name


def _downloaded(rows: Iterator[Any], dataset_id: str) -> Iterator[Any]:
    """The rows; what the network or a broken download raise becomes one line."""
    try:
        yield from rows
    except (OSError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{PACKAGE} {dataset_id}: could not be read ({first_line}); is there a network and room on the disk?"
        ) from error
