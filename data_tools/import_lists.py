"""Public training sets -> collection folders that ``headrank pairs`` and ``headrank label`` take.

A collection holds the queries, their passages, qrels.txt (1 good, 0 bad) and a run. The sets have no first stage, so
the run is a shuffle of each list, seeded by the query: good passages first would be a trap. A teacher's scores, where
the file has them, become labels/NAME.trec for ``headrank pairs --labels``. With ``queries_per_part`` there are several
folders NAME-0000, ...: later steps hold one collection at a time in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from data_tools.collection_files import require_free
from data_tools.labels.sources import PROVENANCE_FORMAT, provenance_path
from data_tools.sources.list_database import SINGULAR, ListDatabase, StoredCandidate
from data_tools.sources.training_lists import (
    Passage,
    TrainingList,
    format_of,
    read_id_texts,
    read_training_lists,
    text_id,
)
from headrank.errors import InputError
from headrank.files import atomic_write, put_in_place, write_json
from headrank.provenance import versions
from headrank.seeds import generator, stable_hash

FACTS_FILE, LABELS_FOLDER = "import.json", "labels"
Watch = Callable[[Iterable[Any], str], Iterator[Any]]


@dataclass(frozen=True)
class ImportSettings:
    """What is kept: at most ``max_negatives`` bad passages of a query and ``max_queries`` queries, drawn with
    ``seed``; 0 keeps all.
    """

    max_negatives: int = 0
    max_queries: int = 0
    queries_per_part: int = 0
    ids_from_text: bool = False
    seed: int = 0


@dataclass
class ImportCounts:
    """What was written."""

    folders: int = 0
    queries: int = 0
    passages: int = 0
    good: int = 0
    bad: int = 0
    scored: int = 0
    left_out: int = 0  # queries without a good or without a bad passage


def import_lists(
    files: Sequence[str | Path],
    output: Path,
    settings: ImportSettings,
    *,
    queries: str | Path | None = None,
    passages: str | Path | None = None,
    watch: Watch = lambda items, what: iter(items),
) -> ImportCounts:
    """Write ``output``; it appears whole or not at all. ``queries`` and ``passages`` explain the ids of id triples."""
    if (queries is None) != (passages is None):
        raise InputError(
            "`queries` and `passages` explain the ids of triples together; give both, or none for files that hold "
            "the texts"
        )
    require_free(output)
    forms = {str(path): "id-triples" if passages is not None else format_of(path) for path in files}
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
    try:
        with ListDatabase(temporary / "lists.sqlite") as database:
            for path, form in forms.items():
                _read(path, form, database, settings, watch)
            for table, file in (("queries", queries), ("passages", passages)):
                if file is not None:
                    _explain(database, table, file, watch)
            made = temporary / "made"
            counts = _write_parts(database, made, output.name, settings, watch)
        facts = {
            "sources": [
                {"file": Path(path).name, "bytes": Path(path).stat().st_size, "format": form}
                for path, form in forms.items()
            ],
            "settings": asdict(settings),
            "counts": asdict(counts)
            | {"lines": database.counts["lines"], "good and bad": database.counts["good and bad"]},
            "run": "a shuffle of each list, seeded by the query; there was no first stage",
            "versions": versions(),
        }
        write_json(made / FACTS_FILE, facts)
        _describe_labels(made / LABELS_FOLDER, facts)
        os.chmod(made, 0o755)
        put_in_place(made, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return counts


def _read(path: str, form: str, database: ListDatabase, settings: ImportSettings, watch: Watch) -> None:
    """Store a file. Of triples, a query's bad passages beyond the wanted number are not even stored: there can be a
    thousand.
    """
    taken: dict[int, int] = {}
    is_triples = form.endswith("triples")
    for listed in watch(read_training_lists(path, form), Path(path).name):
        if settings.ids_from_text and listed.query is not None:
            listed = _named_by_text(listed)
        if is_triples and settings.max_negatives:
            # a number and not the id: millions of queries are remembered here
            key = stable_hash(listed.query_id)
            taken[key] = taken.get(key, 0) + 1
            if taken[key] > settings.max_negatives:
                # the good passage stays: it may be another one than in the lines before
                listed = TrainingList(listed.query_id, listed.query, listed.passages[:1], listed.place)
        database.add(listed)


def _named_by_text(listed: TrainingList) -> TrainingList:
    assert listed.query is not None
    passages = (Passage(text_id(p.title, p.text or ""), p.title, p.text, p.grade, p.score) for p in listed.passages)
    return TrainingList(text_id(listed.query), listed.query, tuple(passages), listed.place)


def _explain(database: ListDatabase, table: str, file: str | Path, watch: Watch) -> None:
    for name, title, text, _ in watch(read_id_texts(file), Path(file).name):
        database.explain(table, name, title, text)
    missing = database.first_unexplained(table)
    if missing is not None:
        raise InputError(f"{file}: has no text for {SINGULAR[table]} id {missing!r} of the triples")


def _write_parts(database: ListDatabase, made: Path, name: str, settings: ImportSettings, watch: Watch) -> ImportCounts:
    counts, chosen = ImportCounts(), _kept_queries(database, settings)
    part: _Part | None = None
    for number, query_id, text in watch(database.queries(), "writing"):
        if chosen is not None and number not in chosen:
            continue
        listed = _drawn(database.candidates(number), query_id, settings)
        if len({candidate.grade for candidate in listed}) < 2:
            counts.left_out += 1
            continue
        if part is None or (settings.queries_per_part and part.num_queries == settings.queries_per_part):
            if part is not None:
                part.finish()
            part = _Part(
                database, made, f"{name}-{counts.folders:04d}" if settings.queries_per_part else "", name, counts
            )
        part.add(query_id, text, listed)
    if part is None:
        raise InputError("no query has a good and a bad passage; nothing can be learned from these lists")
    part.finish()
    return counts


def _kept_queries(database: ListDatabase, settings: ImportSettings) -> set[int] | None:
    """The numbers of a seeded sample, None for all."""
    total = database.counts["queries"]
    if not settings.max_queries or settings.max_queries >= total:
        return None
    # SQLite numbers rows from 1
    drawn = generator(settings.seed, "import", "queries").choice(total, settings.max_queries, replace=False)
    return {int(number) + 1 for number in drawn}


def _drawn(listed: list[StoredCandidate], query_id: str, settings: ImportSettings) -> list[StoredCandidate]:
    """The kept candidates of a query in the order of its run."""
    rng = generator(settings.seed, "import", query_id)
    shuffled = [listed[index] for index in rng.permutation(len(listed))]
    if not settings.max_negatives:
        return shuffled
    bad = iter(range(settings.max_negatives))
    return [candidate for candidate in shuffled if candidate.grade > 0 or next(bad, None) is not None]


class _Part:
    """One collection folder, written as it comes; ``finish`` writes its corpus."""

    def __init__(self, database: ListDatabase, made: Path, folder: str, name: str, counts: ImportCounts) -> None:
        self.database, self.counts, self.num_queries = database, counts, 0
        self.folder, self.tag = made / folder, folder or name
        self.folder.mkdir(parents=True)
        self.labels_path = made / LABELS_FOLDER / f"{self.tag}.trec"
        self._files = contextlib.ExitStack()
        opened = [
            self._files.enter_context(atomic_write(self.folder / file))
            for file in ("queries.tsv", "qrels.txt", "run.bm25.txt")
        ]
        self.queries, self.qrels, self.run = opened
        self.labels: IO[str] | None = None
        database.start_part()

    def add(self, query_id: str, text: str, listed: list[StoredCandidate]) -> None:
        """One query with its candidates in the order of the run."""
        self.queries.write(f"{query_id}\t{text}\n")
        for rank, candidate in enumerate(listed, start=1):
            self.qrels.write(f"{query_id} 0 {candidate.doc_id} {candidate.grade}\n")
            # scores fall with the rank, so that tools which sort by score keep the shuffle
            self.run.write(f"{query_id} Q0 {candidate.doc_id} {rank} {len(listed) + 1 - rank} shuffled\n")
        self._label(query_id, listed)
        self.database.want([candidate.doc_id for candidate in listed])
        self.num_queries += 1
        self.counts.queries += 1
        self.counts.good += sum(candidate.grade > 0 for candidate in listed)
        self.counts.bad += sum(candidate.grade == 0 for candidate in listed)

    def _label(self, query_id: str, listed: list[StoredCandidate]) -> None:
        scored = [(candidate.score, candidate.doc_id) for candidate in listed if candidate.score is not None]
        if scored and self.labels is None:
            self.labels = self._files.enter_context(atomic_write(self.labels_path))
        for rank, (score, doc_id) in enumerate(sorted(scored, key=lambda row: -row[0]), start=1):
            assert self.labels is not None
            self.labels.write(f"{query_id} Q0 {doc_id} {rank} {score:.9g} teacher\n")
        self.counts.scored += len(scored)

    def finish(self) -> None:
        """Write the corpus of exactly the passages that were added, and close everything."""
        with atomic_write(self.folder / "corpus.jsonl") as stream:
            for doc_id, title, text in self.database.wanted_passages():
                stream.write(json.dumps({"docid": doc_id, "title": title, "text": text}, ensure_ascii=False) + "\n")
                self.counts.passages += 1
        self._files.close()
        self.counts.folders += 1


def _describe_labels(folder: Path, facts: dict[str, Any]) -> None:
    """What ``headrank pairs`` keeps with every label: where the scores came from."""
    for run in sorted(folder.glob("*.trec")):
        about = {
            "format": PROVENANCE_FORMAT,
            "is_complete": True,
            "tag": "teacher",
            "inputs": {"teacher": "scores in the imported files"},
        }
        write_json(provenance_path(run), {**about, **facts})
