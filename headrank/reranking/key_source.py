"""Where a late reranker takes the keys of passages from before it computes any: the seam a passage store plugs in at.

In the late layout a passage enters a score through its keys at the readout's key pairs only, and these depend on the
passage, the model and the prompt. A *key source* is asked with passages, answers with the keys of those it knows, and
the reranker computes the others. RecentPassages is the source that every late reranker carries: what it computed
itself, the longest unused forgotten first.

Shapes: A key pairs of the readout (sorted by layer, then group), T tokens of the passage, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from headrank.method.late_layout import QueryVectors
from headrank.passage_store.content import passage_digest

if TYPE_CHECKING:
    from headrank.reranking.late_reader import LateReader

# of recent passages; a full readout of a 135M model takes about 12 KB per token in bfloat16
DEFAULT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class KeptKeys:
    """The keys of one passage, unpadded, after rotary embedding, in any float format, on any device; T is 0 for an
    empty passage.

    The order of A is that of ``LateReader.pairs``. ``is_shortened`` says that the passage's end did not fit before the
    branch.
    """

    keys_ATD: torch.Tensor
    is_shortened: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the passage."""
        return int(self.keys_ATD.shape[1])


Passage = tuple[str, str]  # (title, text)


@dataclass(frozen=True)
class StoredScore:
    """The score of a passage whose keys never left their source, and what its tokens were."""

    score: float
    num_tokens: int
    is_shortened: bool = False


class KeySource(Protocol):
    """What a late reranker asks. Give one to ``HeadRankReranker.from_pretrained(..., key_source=source)``.

    A passage is a (title, text) pair as the caller gave it, before any tokenisation; ``passage_digest`` names it. A
    source that keeps keys exactly (the model's own format) gives scores that are the same bits as without it.
    """

    def check(self, late: LateReader) -> None:
        """Called once before any search. Raise InputError unless the keys fit this model, prompt and ``late.pairs``."""

    def find(self, documents: Sequence[tuple[str, str]]) -> Sequence[KeptKeys | None]:
        """The keys of each passage, None for one that the source does not hold."""


@runtime_checkable
class ScoringSource(KeySource, Protocol):
    """A source that scores passages where they lie instead of handing out their keys; it is asked before everything
    else.
    """

    adds: bool  # whether computed passages are to be added

    def missing(self, documents: Iterable[Passage]) -> list[Passage]:
        """The passages that the source does not hold, each once."""

    def add(self, keys: Sequence[tuple[Passage, KeptKeys]]) -> None:
        """Take over passages that were computed."""

    def score(self, lists: Sequence[tuple[QueryVectors, Sequence[Passage]]]) -> list[list[StoredScore | None]]:
        """For each query (U = 1) and its passages the scores, None for a passage that the source does not hold."""


@dataclass
class KeyUsage:
    """Where keys came from so far. Changed by the thread that computes, read by any: a server's metrics."""

    store_asked: int = 0  # passages looked for in the key source
    store_found: int = 0
    recent_asked: int = 0  # passages looked for among the recent ones
    recent_found: int = 0
    tokens_read: int = 0  # tokens of passages that were scored, whoever held their keys
    tokens_computed: int = 0  # tokens of passages that a forward read


class RecentPassages:
    """The keys of the passages used last, in at most ``num_bytes`` bytes; 0 keeps none."""

    def __init__(self, num_bytes: int = DEFAULT_BYTES) -> None:
        """An empty memory."""
        self.num_bytes, self.used_bytes = num_bytes, 0
        self._kept: OrderedDict[bytes, KeptKeys] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.used_bytes = 0

    def check(self, late: LateReader) -> None:
        """Nothing to check: the reranker that fills it is the one that asks."""

    def find(self, documents: Sequence[tuple[str, str]]) -> list[KeptKeys | None]:
        """The keys of the passages that are still there."""
        found: list[KeptKeys | None] = []
        for digest in map(passage_digest, documents):
            if digest in self._kept:
                self._kept.move_to_end(digest)
            found.append(self._kept.get(digest))
        return found

    def keep(self, document: tuple[str, str], keys: KeptKeys) -> None:
        """Remember one passage and forget the longest unused ones that no longer fit."""
        size = _bytes_of(keys)
        digest = passage_digest(document)
        if size > self.num_bytes or digest in self._kept:
            return
        # a copy of its own: a view would keep the whole batch it was computed in alive
        self._kept[digest] = KeptKeys(keys.keys_ATD.clone(), keys.is_shortened)
        self.used_bytes += size
        while self.used_bytes > self.num_bytes:
            self.used_bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _bytes_of(keys: KeptKeys) -> int:
    return keys.keys_ATD.numel() * keys.keys_ATD.element_size()
