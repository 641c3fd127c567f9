"""Training samples: one context with some of its preference pairs, in an order fixed by seed and epoch.

A context holds hundreds of pairs and one forward scores them all, so a sample is a context with P of its pairs. Two
epochs are offered. "pairs" is the paper's: every pair once, a context with M pairs gives ceil(M / P) samples of nearly
equal size (P = 1 is the paper's literal pair-by-pair). "contexts" is the cheap one: every context once with about P of
its pairs, the next ones in the next epoch, so that ceil(M / P) epochs show every pair once.

Positions: with ``permutations`` = 0 documents stand in the template's order (permutation id 0). With K > 0 each
context has K fixed random orders, ids 1 to K, taken in turn; ``with_retriever_order`` adds id 0 to the turn. The orders
depend on the context id and ``permutation_seed`` alone, so cached reference scores survive another training seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_tools.epoch_order import EpochOrder
from data_tools.token_cache import open_cache
from headrank.errors import InputError
from headrank.method.spans import EncodedContext, PromptEncoder
from headrank.seeds import generator, stable_hash

EPOCHS = ("pairs", "contexts")


@dataclass(frozen=True)
class Sample:
    """One context in one document order with P of its pairs. N documents, everything [N] in prompt order."""

    context_id: str
    query_id: str
    context_index: int  # place in contexts.jsonl
    permutation: int  # 0 = template order
    encoded: EncodedContext
    retrieval_ranks: np.ndarray  # int64 [N], from 1, within this list
    grades: np.ndarray  # int64 [N], -1 = unjudged
    pairs: np.ndarray  # int64 [P, 2], (chosen, rejected) prompt positions
    teacher: np.ndarray | None = None  # float32 [N], a teacher's scores, NaN where it gave none; None without a teacher


class TrainingSet:
    """The samples of a folder with contexts.jsonl and pairs.jsonl."""

    def __init__(
        self,
        directory: str | Path,
        encoder: PromptEncoder,
        pairs_per_context: int = 16,
        seed: int = 1234,
        permutations: int = 0,
        *,
        epoch: str = "pairs",
        with_retriever_order: bool = False,
        permutation_seed: int = 0,
        cache_directory: str | Path | None = None,
    ) -> None:
        """Tokenise ``directory`` (once, then cached in directory/cache or ``cache_directory``) and open it."""
        if pairs_per_context < 1:
            raise InputError(f"pairs per context must be at least 1, not {pairs_per_context}")
        if permutations < 0:
            raise InputError(f"permutations must be 0 (the retriever's order) or more, not {permutations}")
        if epoch not in EPOCHS:
            raise InputError(f"epoch {epoch!r} is not one of {', '.join(EPOCHS)}")
        self.directory, self.encoder = Path(directory), encoder
        self.pairs_per_context, self.seed, self.epoch_unit = pairs_per_context, seed, epoch
        ids = range(1, permutations + 1) if permutations else range(1)
        self.permutation_ids = (0, *ids) if permutations and with_retriever_order else tuple(ids)
        cache = None if cache_directory is None else Path(cache_directory)
        self.cache = open_cache(self.directory, encoder, self.permutation_ids, permutation_seed, cache)
        self.num_contexts = self.cache.num_contexts
        # arrays and one search per sample instead of a list of all samples: a million contexts cost megabytes
        self._chunks = -(-np.diff(self.cache.pair_starts) // pairs_per_context)  # [C] ceil(M / P)
        per_context = self._chunks if epoch == "pairs" else np.minimum(self._chunks, 1)
        self._starts = np.concatenate([[0], np.cumsum(per_context)])
        if not self._starts[-1]:
            raise InputError(f"{self.directory}: no pairs to train on; make them with 'headrank pairs'")

    @property
    def directories(self) -> list[Path]:
        """Where the contexts are."""
        return [self.directory]

    def names_of(self, context: int) -> tuple[str, str]:
        """Context id and query id."""
        return self.cache.names_of(context)

    @property
    def num_pairs(self) -> int:
        """Pairs in the folder."""
        return int(self.cache.pair_starts[-1])

    def __len__(self) -> int:
        """Samples in one epoch."""
        return int(self._starts[-1])

    def sample(self, epoch: int, index: int) -> Sample:
        """The ``index``-th sample of an epoch (both from 0): the same for the same seed, whatever was asked before."""
        context, chunk, slot = self._place(epoch, index)
        num_chunks = int(self._chunks[context])
        cycle = epoch
        if self.epoch_unit == "contexts":
            cycle, chunk = divmod(epoch, num_chunks)
        pairs = self.cache.pairs_of(context)
        # keyed by context and pass, not drawn in sequence: any rank can make any sample, and a resumed run makes the
        # same ones
        shuffled = generator(self.seed, "pairs", cycle, context).permutation(len(pairs))
        # nearly equal parts: a last chunk of one pair would weigh as much as one of sixteen
        chosen = pairs[shuffled[len(pairs) * chunk // num_chunks : len(pairs) * (chunk + 1) // num_chunks]]
        return self._assemble(context, slot, chosen)

    def _place(self, epoch: int, index: int) -> tuple[int, int, int]:
        """Of a sample: its context, its number among the context's samples of the epoch, and the slot of its
        document order.
        """
        place = self.order(epoch)[index]
        context = int(np.searchsorted(self._starts, place, side="right")) - 1
        number = place - int(self._starts[context])
        return context, number, (stable_hash(self.seed, "turn", context) + epoch + number) % len(self.permutation_ids)

    def context_at(self, global_index: int) -> tuple[int, int]:
        """(context, permutation) of the sample with this number since the start of training, without assembling it."""
        context, _, slot = self._place(*divmod(global_index, len(self)))
        return context, self.permutation_ids[slot]

    def order(self, epoch: int) -> EpochOrder:
        """The permutation of an epoch's samples."""
        return _epoch_order(len(self), self.seed, epoch)

    def at(self, global_index: int) -> Sample:
        """The sample with this number since the start of training: epochs follow each other without a gap."""
        return self.sample(*divmod(global_index, len(self)))

    def shard(self, start: int, rank: int, world_size: int) -> Iterator[int]:
        """Global indices of one data-parallel rank, for ever, from the ``start``-th sample of the whole job.

        Consecutive samples go to consecutive ranks, so a job may resume with another number of ranks and see the same
        samples a step as long as the global batch stays the same.
        """
        if not 0 <= rank < world_size or start < 0:
            raise ValueError(f"rank {rank} of {world_size}, start {start}")
        while True:
            yield start + rank
            start += world_size

    def whole_context(self, context: int, permutation: int) -> Sample:
        """A context in one of its orders with all of its pairs; reference scores are computed from these."""
        return self._assemble(context, self.permutation_ids.index(permutation), self.cache.pairs_of(context))

    def _assemble(self, context: int, slot: int, list_pairs: np.ndarray) -> Sample:
        encoded, order = self.cache.encoded(context, slot)
        position = np.empty(len(order), np.int64)  # list index -> prompt position
        position[order] = np.arange(len(order))
        context_id, query_id = self.cache.names_of(context)
        teacher = self.cache.teacher_of(context)[order]
        return Sample(
            context_id=context_id,
            query_id=query_id,
            context_index=context,
            permutation=self.permutation_ids[slot],
            encoded=encoded,
            retrieval_ranks=order.astype(np.int64) + 1,
            grades=self.cache.grades_of(context)[order].astype(np.int64),
            pairs=position[list_pairs].reshape(-1, 2),
            teacher=None if np.isnan(teacher).all() else teacher,
        )


@lru_cache(maxsize=8)
def _epoch_order(length: int, seed: int, epoch: int) -> EpochOrder:
    return EpochOrder(length, seed, epoch)
