"""One reranker behind an adapter: loaded on first use, safe from several threads, awaitable without blocking an event
loop.

Frameworks make, copy and serialise components long before they run them, so an adapter keeps the settings and the model
comes with the first list. One list is scored at a time: a forward already uses every core, and tokenizers are not safe
to share.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from headrank.errors import InputError
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

ScoredIndex = tuple[int, float]


@dataclass(frozen=True)
class RerankerSettings:
    """What ``HeadRankReranker.from_pretrained`` is called with; plain values, so that any framework can write them
    down.
    """

    model: str = "embedded"
    heads: str | None = None
    device: str | None = None
    dtype: str | None = None
    batch_size: int | None = None
    max_length: int | None = None

    def load(self) -> HeadRankReranker:
        """The reranker that the settings describe."""
        options = asdict(self)
        return HeadRankReranker.from_pretrained(options.pop("model"), options.pop("heads"), **options)


class SharedReranker:
    """Scores lists for one adapter, from whichever thread or event loop asks."""

    def __init__(self, settings: RerankerSettings, reranker: HeadRankReranker | None = None) -> None:
        """``reranker`` is one that is loaded already; else ``settings`` load one when the first list comes."""
        self.settings, self._reranker = settings, reranker
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedReranker:
        """Copies of a component share the model: deep copies are how frameworks configure a chain, not how they load
        weights.
        """
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process loads its own model from the settings; locks and threads do not travel."""
        return SharedReranker, (self.settings,)

    def load(self) -> HeadRankReranker:
        """The reranker, loaded now if it is not yet."""
        with self._lock:
            return self._loaded()

    def _loaded(self) -> HeadRankReranker:
        if self._reranker is None:
            self._reranker = self.settings.load()
        return self._reranker

    def score_lists(
        self, lists: Sequence[tuple[str, Sequence[DocumentLike]]], batch_size: int | None = None
    ) -> list[list[float]]:
        """The scores of each list in the order its documents were given; lists without documents cost nothing."""
        filled = [place for place, (_, documents) in enumerate(lists) if len(documents)]
        scores: list[list[float]] = [[] for _ in lists]
        if filled:
            with self._lock:
                found = self._loaded().score_batch([lists[place] for place in filled], batch_size=batch_size)
            for place, result in zip(filled, found, strict=True):
                scores[place] = [float(score) for score in result.scores]
        return scores

    def rank(self, query: str, documents: Sequence[DocumentLike], top_k: int | None = None) -> list[ScoredIndex]:
        """(place among the documents given, score), best first; equal scores keep the order given."""
        check_top_k(top_k)
        return best_first(self.score_lists([(query, documents)])[0], top_k)

    async def arank(self, query: str, documents: Sequence[DocumentLike], top_k: int | None = None) -> list[ScoredIndex]:
        """The same in a thread of its own: the event loop goes on, and work that is cancelled before its turn is
        never done.
        """
        check_top_k(top_k)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrank")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.rank, query, documents, top_k)


def best_first(scores: Sequence[float], top_k: int | None = None) -> list[ScoredIndex]:
    """(place, score) from the highest score down; equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:top_k]
    return [(place, scores[place]) for place in order]


def check_top_k(top_k: int | None) -> None:
    """None keeps every document; zero or fewer is a mistake."""
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k {top_k} must be at least 1")


def document_from(text: str, metadata: Mapping[str, Any], title_key: str | None = "title") -> DocumentLike:
    """A framework's document with the title that its metadata hold, if they hold one that is text."""
    title = metadata.get(title_key) if title_key else None
    return {"title": title, "text": text} if isinstance(title, str) and title else text
