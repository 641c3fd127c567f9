"""A store behind a late reranker: passages that are there are scored where they lie, the others are computed, and
added if asked for.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.errors import InputError
from headrank.method.late_layout import QueryVectors
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import KeyIdentity
from headrank.passage_store.keys import StoredForm
from headrank.passage_store.scan import Scanner
from headrank.passage_store.store import Entry, PassageStore
from headrank.passage_store.writer import StoreWriter, recover_all, writing
from headrank.reranking.key_source import KeptKeys, Passage, StoredScore

if TYPE_CHECKING:
    from headrank.reranking.late_reader import LateReader


_ADDED_BYTES = 2**28  # a segment that is being added to is sorted again after every list: keep it small


class StoredPassages:
    """A ScoringSource on a store; made with the folder, then checked against the reranker that asks."""

    def __init__(self, folder: str | Path, *, add: bool = False) -> None:
        """``add`` writes passages that had to be computed, and holds the store's lock until ``close`` or the end of
        the process.
        """
        self.store, self.adds = PassageStore(folder), add
        header = self.store.header
        self.form = StoredForm(header.dtype, header.pool, self.store.scales)
        self._places: list[int] = []
        self._late: LateReader | None = None
        self._scanner: Scanner | None = None
        self._writer: StoreWriter | None = None
        self._lock = contextlib.ExitStack()
        if add:
            self._begin_adding()

    def _begin_adding(self) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise InputError(
                f"{self.store.folder}: one process adds to a store; index first ('torchrun ... -m headrank index'), "
                "then read"
            )
        self._lock.enter_context(writing(self.store.folder))
        recover_all(self.store.folder, self.store.header)
        self.store.refresh()
        self._writer = StoreWriter(self.store.folder, self.store.header, segment_bytes=_ADDED_BYTES)
        weakref.finalize(self, _finish, self._writer, self._lock)

    def close(self) -> None:
        """Seal what was added and let the lock go; reading goes on."""
        if self._writer is not None:
            _finish(self._writer, self._lock)
            self._writer, self.adds = None, False

    def check(self, late: LateReader) -> None:
        """Raise InputError unless the store holds this reranker's keys."""
        header = self.store.header
        identity = KeyIdentity.of(late.reader.name, late.heads.prompt, header.identity.head_size)
        header.check_serves(identity, late.pairs, self.store.folder)
        if self.adds and tuple(late.pairs) != header.pairs:
            raise InputError(
                f"{self.store.folder}: this reranker computes {len(late.pairs)} of the store's {len(header.pairs)} "
                "pairs and cannot add "
                "passages; leave `store_add` out, or index with these heads"
            )
        self._late, self._places = late, header.places(late.pairs)
        self._scanner = Scanner(self.form, self._places, late.pair_of_head, header.identity.head_size)

    def find(self, documents: Sequence[Passage]) -> list[KeptKeys | None]:
        """The keys themselves, in float32: for whoever needs more than a score. Pooled stores have none to give."""
        # pooled keys are means of several tokens: they score here, but are no keys of single tokens
        if self.form.pool > 1:
            return [None] * len(documents)
        return [
            None if entry is None else KeptKeys(self.form.decode(entry.keys_ATD)[self._places], entry.is_shortened)
            for entry in self._entries(documents)
        ]

    def score(self, lists: Sequence[tuple[QueryVectors, Sequence[Passage]]]) -> list[list[StoredScore | None]]:
        """The score of every passage that is here, None for the others; queries that share a list are scanned
        together.
        """
        by_list: dict[tuple[Passage, ...], list[int]] = {}
        for number, (_, documents) in enumerate(lists):
            # queries over the same list share one scan: its keys are read from memory once
            by_list.setdefault(tuple(documents), []).append(number)
        results: list[list[StoredScore | None]] = [[] for _ in lists]
        for documents, numbers in by_list.items():
            entries = self._entries(documents)
            for number, scores in zip(
                numbers, self._scan([lists[number][0] for number in numbers], entries), strict=True
            ):
                results[number] = scores
        return results

    def missing(self, documents: Iterable[Passage]) -> list[Passage]:
        """The passages that are not here, each once."""
        unique = list(dict.fromkeys(documents))
        return [document for document, entry in zip(unique, self._entries(unique), strict=True) if entry is None]

    def add(self, keys: Sequence[tuple[Passage, KeptKeys]]) -> None:
        """Write passages that were computed; they are found from now on."""
        assert self._writer is not None, "asked for with add=True"
        for document, kept in keys:
            stored, saturated = self.form.encode(kept.keys_ATD)
            digest = passage_digest(document)
            self._writer.add(digest, stored, kept.num_tokens, is_shortened=kept.is_shortened, saturated=saturated)
        self._writer.commit()
        self.store.refresh()

    def _scan(self, queries: Sequence[QueryVectors], entries: Sequence[Entry | None]) -> list[list[StoredScore | None]]:
        assert self._scanner is not None and self._late is not None, "check() comes first"
        late = self._late
        found = [entry for entry in entries if entry is not None]
        scores = self._scanner.scores(queries, found, late.weights_K, late.offsets_K, late.readout.floor).tolist()
        results: list[list[StoredScore | None]] = []
        for of_query in scores:
            values = iter(of_query)
            results.append(
                [
                    None if entry is None else StoredScore(next(values), entry.num_tokens, entry.is_shortened)
                    for entry in entries
                ]
            )
        return results

    def _entries(self, documents: Sequence[Passage]) -> list[Entry | None]:
        digests = [passage_digest(document) for document in documents]
        entries = self.store.find(digests)
        if None in entries and self._writer is None:  # another process may have added it since
            before = len(self.store)
            self.store.refresh()
            if len(self.store) != before:
                entries = self.store.find(digests)
        return entries


def _finish(writer: StoreWriter, lock: contextlib.ExitStack) -> None:
    writer.close()
    lock.close()
