"""From collections to contexts.jsonl + pairs.jsonl: phase 1 of the paper's Algorithm 1."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Collection as Sized
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, SUMMARY_FILE, Context, ContextDocument, Pair
from data_tools.labels.grades import GradeSettings
from data_tools.labels.sources import CollectionLabels, Label, labels_of
from data_tools.pairs import (
    SUBLISTS_BY,
    adjacent_pairs,
    cap_pairs,
    known_grades,
    random_pairs,
    sample_strata,
    sample_sublists,
)
from headrank.errors import InputError
from headrank.formats import Candidate, Collection, Document, Run, atomic_write
from headrank.seeds import generator

logger = logging.getLogger(__name__)

MAX_SUBLISTS = 1_000_000  # a slip of the keyboard would otherwise fill the disk


@dataclass(frozen=True)
class PairSettings:
    """The switches of ``headrank pairs``; ``max_pairs`` and ``sublists`` of 0 mean off."""

    depth: int = 100
    unjudged_as_zero: bool = False
    judged_only: bool = False
    random_pairs: bool = False
    max_pairs: int = 0
    sublists: int = 0
    sublist_size: tuple[int, int] = (20, 20)  # smallest, largest
    keep_full_list: bool = False
    sublists_by: str = "chance"  # "score": one passage from each stratum of the teacher's order
    list_words: tuple[int, ...] = ()  # the passages of each list are cut to one of these, drawn per query
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise InputError(f"`depth` {self.depth}: a pair needs at least two candidates")
        if self.judged_only and self.unjudged_as_zero:
            raise InputError("`judged_only` leaves unjudged candidates out, `unjudged_as_zero` keeps them; give one")
        if self.sublists and self.sublist_size[0] < 2:
            raise InputError(f"`sublist_size` {self.sublist_size[0]}: a pair needs at least two candidates")
        if self.sublist_size[0] > self.sublist_size[1]:
            raise InputError(f"`sublist_size` {self.sublist_size[0]}-{self.sublist_size[1]}: the smallest comes first")
        if self.sublists_by not in SUBLISTS_BY:
            raise InputError(f"`sublists_by` {self.sublists_by}: not one of {', '.join(SUBLISTS_BY)}")
        if any(words < 1 for words in self.list_words):
            raise InputError(f"`list_words` {min(self.list_words)}: a passage keeps at least one word")
        if self.max_pairs < 0 or self.sublists < 0:
            raise InputError("`max_pairs_per_query` and `sublists` cannot be negative")
        if self.sublists > MAX_SUBLISTS:
            raise InputError(
                f"`sublists` {self.sublists}: more than {MAX_SUBLISTS:,} of one query; is there a digit too many?"
            )


@dataclass
class PairCounts:
    """What one collection gave. ``steps`` counts pairs by (chosen grade, rejected grade)."""

    name: str
    queries: int = 0
    unjudged_queries: int = 0
    queries_without_pairs: int = 0
    contexts: int = 0
    documents: int = 0
    judged_documents: int = 0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def pairs(self) -> int:
        """All pairs of the collection."""
        return sum(self.steps.values())

    @property
    def pairs_per_query(self) -> float:
        """Mean over the queries that have judgements."""
        return self.pairs / judged if (judged := self.queries - self.unjudged_queries) else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain values."""
        steps = {f"{high}>{low}": number for (high, low), number in sorted(self.steps.items())}
        counted = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "steps"}
        return {**counted, "steps": steps, "pairs": self.pairs, "pairs_per_query": round(self.pairs_per_query, 2)}


def build_pairs(
    collections: Sequence[Collection],
    output: Path,
    settings: PairSettings,
    *,
    hold_out: Sized[str] = (),
    only: Sized[str] | None = None,
    label_runs: Sequence[Path] = (),
    grades: GradeSettings | None = None,
) -> list[PairCounts]:
    """Write the training files of the collections to ``output`` and return the counts, one entry per collection.

    One collection at a time is in memory: its run, its labels and the texts of its candidates. All files appear
    together at the end or not at all. Queries in ``hold_out`` are left out; with ``only`` all others are. Only contexts
    that have a pair are written. ``label_runs`` are a teacher's, one per collection: ``grades`` says how its scores
    become grades, and every document keeps its score.
    """
    _check_names(collections)
    counts, unseen = [], set(hold_out) | set(only or ())
    provenance: list[dict[str, Any]] = []
    with contextlib.ExitStack() as files:
        # entered first = renamed last: the summary is the sign that contexts and pairs are complete
        summary = files.enter_context(atomic_write(output / SUMMARY_FILE))
        contexts = files.enter_context(atomic_write(output / CONTEXTS_FILE))
        pairs = files.enter_context(atomic_write(output / PAIRS_FILE))
        for number, collection in enumerate(collections):
            count = PairCounts(collection.name)
            labels = labels_of(collection, label_runs[number] if label_runs else None, grades or GradeSettings())
            if (known := labels.provenance()) is not None:
                provenance.append({"collection": collection.name, **known})
            run = collection.run()
            # a mistyped id of a hold-out list would let its query into the training without a word
            unseen -= run.keys()
            kept = {
                query_id: rows
                for query_id, rows in run.items()
                if query_id not in hold_out and (only is None or query_id in only)
            }
            for context, chosen in _preferences(collection, kept, labels, settings, count):
                contexts.write(json.dumps(context.to_dict(), ensure_ascii=False) + "\n")
                pairs.writelines(
                    json.dumps(pair.to_dict(), ensure_ascii=False) + "\n" for pair in _records(context, chosen)
                )
            counts.append(count)
        if unseen:
            raise InputError(
                f"query id {min(unseen)!r} of the `hold_out` or `only` list is in none of the runs; correct the list"
            )
        if not any(count.pairs for count in counts):
            raise InputError(
                "no pairs: no two judged or labelled candidates have adjacent grades; see `depth` and "
                "`unjudged_as_zero`"
            )
        # an older one must not vouch for files of which only some are replaced
        (output / SUMMARY_FILE).unlink(missing_ok=True)
        described = {"settings": asdict(settings), "collections": [count.to_dict() for count in counts]}
        json.dump({**described, "labels": provenance} if provenance else described, summary, indent=2)
        summary.write("\n")
    return counts


def _check_names(collections: Sequence[Collection]) -> None:
    names = Counter(collection.name for collection in collections)
    twice = next((name for name, number in names.items() if number > 1), None)
    if twice is not None:
        raise InputError(
            f"two collections are called {twice!r}; rename one folder, the name becomes part of the context ids"
        )


def _preferences(
    collection: Collection, run: Run, labels: CollectionLabels, settings: PairSettings, count: PairCounts
) -> Iterator[tuple[Context, np.ndarray]]:
    """Yield each context that has pairs with its index pairs [M, 2]; count as it goes."""
    queries = collection.queries()
    unknown = next((query_id for query_id in run if query_id not in queries), None)
    if unknown is not None:
        raise InputError(
            f"{collection.run_path}: query {unknown!r} is not in {collection.queries_path}; add its text or remove it"
        )
    labelled_run = {query_id: rows[: settings.depth] for query_id, rows in run.items() if query_id in labels}
    count.queries, count.unjudged_queries = len(run), len(run) - len(labelled_run)
    texts = collection.documents({row.doc_id for rows in labelled_run.values() for row in rows}) if labelled_run else {}
    for query_id, rows in labelled_run.items():
        candidates = _candidates(rows, labels.of(query_id, [row.doc_id for row in rows]), texts, settings)
        candidates = _cut(candidates, f"{collection.name}/{query_id}", settings)
        count.documents += len(rows)
        count.judged_documents += sum(is_judged for _, is_judged in candidates)
        # ranks stay the retriever's: the middle zone is found by them, whatever is left out
        documents = [document for document, is_judged in candidates if is_judged or not settings.judged_only]
        found = False
        for context_id, members in _lists(f"{collection.name}/{query_id}", documents, settings):
            listed = tuple(documents[i] for i in members)
            chosen = _choose([document.grade for document in listed], context_id, settings)
            # a list without a pair teaches nothing, and would still cost a forward in every epoch
            if not len(chosen):
                continue
            found = True
            count.contexts += 1
            count.steps.update((listed[high].grade, listed[low].grade) for high, low in chosen)
            yield Context(context_id, query_id, queries[query_id], listed), chosen
        count.queries_without_pairs += not found


def _candidates(
    rows: Sequence[Candidate], labels: Sequence[Label], texts: Mapping[str, Document], settings: PairSettings
) -> list[tuple[ContextDocument, bool]]:
    """The candidates of one query as they stand in a context, and whether each is judged or labelled."""
    grades = known_grades([label.grade for label in labels], unjudged_as_zero=settings.unjudged_as_zero)
    return [
        (
            ContextDocument(
                row.doc_id,
                texts[row.doc_id].title,
                texts[row.doc_id].text,
                row.rank,
                grade,
                label.teacher_score,
                label.grade_from,
            ),
            label.grade is not None,
        )
        for row, label, grade in zip(rows, labels, grades, strict=True)
    ]


def _cut(
    candidates: list[tuple[ContextDocument, bool]], name: str, settings: PairSettings
) -> list[tuple[ContextDocument, bool]]:
    """The candidates with the first words of their texts: as many for all of a query, so that no length betrays a
    label.
    """
    if not settings.list_words:
        return candidates
    words = int(generator(settings.seed, "words", name).choice(settings.list_words))
    return [
        (replace(document, text=" ".join(document.text.split()[:words])), is_judged)
        for document, is_judged in candidates
    ]


def _lists(
    name: str, documents: Sequence[ContextDocument], settings: PairSettings
) -> Iterator[tuple[str, Sequence[int]]]:
    """The contexts of one query as (context id, indices into its candidates): the whole list, sub-lists, or both."""
    if not settings.sublists or settings.keep_full_list:
        yield name, range(len(documents))
    if settings.sublists and not (settings.keep_full_list and len(documents) <= settings.sublist_size[0]):
        # a generator for every list: adding a collection or leaving out a query changes no other list
        rng = generator(settings.seed, "sublists", name)
        if settings.sublists_by == "score":
            drawn = sample_strata(
                [document.teacher_score for document in documents], settings.sublists, settings.sublist_size, rng
            )
        else:
            drawn = sample_sublists(
                [document.grade for document in documents], settings.sublists, settings.sublist_size, rng
            )
        for number, members in enumerate(drawn):
            yield f"{name}/sublist-{number}", members.tolist()


def _choose(grades: list[int | None], context_id: str, settings: PairSettings) -> np.ndarray:
    rng = generator(settings.seed, "pairs", context_id)
    pairs = random_pairs(grades, rng) if settings.random_pairs else adjacent_pairs(grades)
    return cap_pairs(pairs, grades, settings.max_pairs, rng) if settings.max_pairs else pairs


def _records(context: Context, chosen: np.ndarray) -> Iterator[Pair]:
    for high, low in chosen:
        better, worse = context.documents[high], context.documents[low]
        yield Pair(context.context_id, context.query_id, better.doc_id, worse.doc_id, better.grade, worse.grade)
