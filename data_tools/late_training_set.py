"""Training lists of the late layout: a query and some passages of its list, drawn anew in every epoch.

A list keeps 16 or 40 labelled passages and one visit computes ``passages_per_query`` of them. Which ones depends on the
seed, the epoch and the context alone. With a teacher they are spread over its order, one from each stratum, so that the
best and the worst are always represented; without one a preference pair comes first and chance fills the rest. Pairs
are those of pairs.jsonl whose passages were both drawn. Empty passages are never drawn: there is nothing to attend to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_tools.late_cache import LateCache, open_late_cache, token_digest
from data_tools.list_mixture import ListMixture
from data_tools.pairs import sample_strata
from headrank.errors import InputError
from headrank.method.late_prompt import EncodedQuery, LateEncoder
from headrank.seeds import generator


@dataclass(frozen=True)
class LateFrame:
    """What all rows of a prompt share: the opening, and where query branches begin."""

    opening_ids: np.ndarray
    branch_position: int


@dataclass(frozen=True)
class LateSample:
    """One query with some passages of its list. N passages of M in the list, everything [N] in list order."""

    context_id: str
    query_id: str
    context_index: int  # over all folders
    permutation: int  # always 0: the layout has no order
    query: EncodedQuery
    query_digest: int
    frame: LateFrame
    passages: tuple[np.ndarray, ...]  # tokens
    digests: np.ndarray  # uint64 [N]
    list_digests: np.ndarray  # uint64 [M]
    places: np.ndarray  # int64 [N], index in the list
    retrieval_ranks: np.ndarray  # int64 [N], from 1, within this list
    grades: np.ndarray  # int64 [N], -1 = unjudged
    pairs: np.ndarray  # int64 [P, 2], (chosen, rejected) positions among the N
    teacher: np.ndarray | None = None  # float32 [N], NaN where it gave none; None without a teacher

    def restricted_to(self, chosen: np.ndarray) -> LateSample:
        """The same query with the passages at some positions; pairs are kept where both of theirs are."""
        position = np.full(len(self.passages), -1, np.int64)
        position[chosen] = np.arange(len(chosen))
        pairs = position[self.pairs].reshape(-1, 2)
        return replace(
            self,
            passages=tuple(self.passages[place] for place in chosen),
            pairs=pairs[(pairs >= 0).all(axis=1)],
            teacher=None if self.teacher is None else self.teacher[chosen],
            **{name: getattr(self, name)[chosen] for name in ("digests", "places", "retrieval_ranks", "grades")},
        )


class LateTrainingSet:
    """The lists of one or several folders with contexts.jsonl and pairs.jsonl."""

    permutation_ids = (0,)

    def __init__(
        self,
        directories: Sequence[str | Path],
        encoder: LateEncoder,
        *,
        shares: Sequence[float] | None = None,
        passages_per_query: int = 8,
        seed: int = 1234,
        needs_pairs: bool = False,
        cache_directory: str | Path | None = None,
    ) -> None:
        """Tokenise the folders (once, then cached in each one's cache/ or in ``cache_directory``) and open them.

        ``needs_pairs`` is for objectives that have nothing to learn from a visit without a preference pair.
        """
        if passages_per_query < 2:
            raise InputError(f"passages per query must be at least 2, not {passages_per_query}")
        self.directories, self.encoder, self.seed = [Path(directory) for directory in directories], encoder, seed
        self.passages_per_query, self.needs_pairs = passages_per_query, needs_pairs
        self.frame = LateFrame(encoder.opening_ids, encoder.template.branch_position)
        cache = None if cache_directory is None else Path(cache_directory)
        self.caches = [open_late_cache(directory, encoder, cache) for directory in self.directories]
        for directory, opened in zip(self.directories, self.caches, strict=True):
            _check_lists(directory, opened, needs_pairs)
        sizes = [opened.num_contexts for opened in self.caches]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.num_contexts = int(self._starts[-1])
        self._mixture = ListMixture(sizes, shares, seed)

    @property
    def num_pairs(self) -> int:
        """Pairs in the folders."""
        return sum(int(cache.pair_starts[-1]) for cache in self.caches)

    def __len__(self) -> int:
        """Lists of an epoch."""
        return len(self._mixture)

    def names_of(self, context: int) -> tuple[str, str]:
        """Context id and query id."""
        cache, inner = self._place(context)
        return cache.names_of(inner)

    def context_at(self, global_index: int) -> tuple[int, int]:
        """(context, permutation) of the sample with this number since the start of training."""
        folder, inner, _ = self._mixture.at(global_index)
        return int(self._starts[folder]) + inner, 0

    def at(self, global_index: int) -> LateSample:
        """The sample with this number since the start of training: the same whatever was asked before."""
        folder, inner, epoch = self._mixture.at(global_index)
        return self._assemble(
            int(self._starts[folder]) + inner, self._draw(self.caches[folder], inner, (self.seed, folder, epoch))
        )

    def shard(self, start: int, rank: int, world_size: int) -> Iterator[int]:
        """Global indices of one data-parallel rank, for ever; consecutive samples go to consecutive ranks."""
        if not 0 <= rank < world_size or start < 0:
            raise ValueError(f"rank {rank} of {world_size}, start {start}")
        while True:
            yield start + rank
            start += world_size

    def whole_context(self, context: int, permutation: int = 0) -> LateSample:
        """A whole list with all of its pairs, for held-out and reference scores."""
        cache, inner = self._place(context)
        return self._assemble(context, np.arange(len(cache.members_of(inner))))

    def _place(self, context: int) -> tuple[LateCache, int]:
        folder = int(np.searchsorted(self._starts, context, side="right")) - 1
        return self.caches[folder], context - int(self._starts[folder])

    def _draw(self, cache: LateCache, inner: int, key: tuple[int, ...]) -> np.ndarray:
        """Sorted list indices of the passages of one visit."""
        members = cache.members_of(inner)
        # an empty passage has no token to give a gradient; reranking puts it last without asking the model
        usable = np.flatnonzero(cache.lengths_of(members))
        if len(usable) <= self.passages_per_query:
            return usable
        # keyed by folder, epoch and list: another visit draws other passages, a resumed run draws the same
        rng = generator("passages", *key, inner)
        teacher = cache.teacher_of(inner)[usable]
        if (~np.isnan(teacher)).sum() >= self.passages_per_query:
            scores = [None if np.isnan(score) else float(score) for score in teacher]
            spread = usable[sample_strata(scores, 1, (self.passages_per_query, self.passages_per_query), rng)[0]]
            # a draw by strata may miss every pair of a list with few of them; then one is put in by hand below
            if not self.needs_pairs or np.isin(cache.pairs_of(inner), spread).all(axis=1).any():
                return spread
        pairs = cache.pairs_of(inner)
        pairs = pairs[np.isin(pairs, usable).all(axis=1)]
        first = pairs[rng.integers(len(pairs))] if len(pairs) else usable[:0]
        others = np.setdiff1d(usable, first)
        return np.sort(np.concatenate([first, rng.choice(others, self.passages_per_query - len(first), replace=False)]))

    def _assemble(self, context: int, places: np.ndarray) -> LateSample:
        cache, inner = self._place(context)
        members, query = cache.members_of(inner), cache.query_of(inner)
        position = np.full(len(members), -1, np.int64)  # list index -> place among the drawn
        position[places] = np.arange(len(places))
        pairs = position[cache.pairs_of(inner)].reshape(-1, 2)
        context_id, query_id = cache.names_of(inner)
        teacher = cache.teacher_of(inner)[places]
        return LateSample(
            context_id=context_id,
            query_id=query_id,
            context_index=context,
            permutation=0,
            query=query,
            query_digest=token_digest(query.input_ids),
            frame=self.frame,
            passages=tuple(cache.passage(int(number)).input_ids for number in members[places]),
            digests=np.array(cache.digests[members[places]]),
            # of the whole list and not of the draw: a relevant passage that was not drawn must not become a negative
            # elsewhere in the batch
            list_digests=np.array(cache.digests[members]),
            places=places,
            # the place in the list is the retriever's rank: contexts are written in its order
            retrieval_ranks=places.astype(np.int64) + 1,
            grades=cache.grades_of(inner)[places],
            pairs=pairs[(pairs >= 0).all(axis=1)],
            teacher=None if np.isnan(teacher).all() else teacher,
        )


def _check_lists(directory: Path, cache: LateCache, needs_pairs: bool) -> None:
    """A folder has lists, every list a passage with text and, where the objective asks for it, a pair."""
    if not cache.num_contexts:
        raise InputError(f"{directory}: no lists to train on; make them with 'headrank pairs'")
    is_usable = (cache.lengths_of(cache.members) > 0).astype(np.int64)
    # reduceat needs non-empty lists, which contexts.jsonl guarantees
    counts = np.add.reduceat(is_usable, cache.documents[:-1])
    for number in np.flatnonzero(counts == 0)[:1]:
        raise InputError(f"{directory}: all passages of context {cache.names_of(number)[0]!r} are empty; remove it")
    for number in np.flatnonzero(np.diff(cache.pair_starts) == 0)[:1] if needs_pairs else ():
        raise InputError(
            f"{directory}: context {cache.names_of(number)[0]!r} has no preference pair; make the file with "
            "'headrank pairs', or train on "
            "a teacher's scores alone: `loss` teacher"
        )
