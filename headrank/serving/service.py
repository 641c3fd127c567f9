"""From a call to its answer: limits, chunks, the queue, the order of the documents."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrank.reranking.explain import Explanation
from headrank.reranking.rerank_requests import ListScores
from headrank.serving.batcher import Batcher, Work
from headrank.serving.call import Ranked, RerankAnswer, RerankCall
from headrank.serving.engine import RerankerEngine
from headrank.serving.highlights import Sentence, sentences_of
from headrank.serving.long_documents import Chunked, ChunkLimits, best_chunks, chunk_documents, surely_fits
from headrank.serving.problems import Problem
from headrank.serving.server_metrics import ServerMetrics
from headrank.serving.settings import ServeSettings

_BYTES_PER_TOKEN = 4  # of the estimate for the budget; answers count real tokens
_EXTRA_TOKENS = 16  # of a query's branch
_MOST_BYTES_PER_TOKEN = 32  # a query with more bytes per allowed token is refused without being tokenised
_EXPLAINED_AT_A_TIME = 32  # passages: each keeps a number per head, query token and passage token
Disconnect = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Scored:
    """A call with everything that was found out about it."""

    call: RerankCall
    chunked: Chunked
    work: Work
    result: ListScores

    @property
    def best(self) -> list[int]:
        """The best chunk of each document."""
        return best_chunks(self.result.scores.tolist(), self.chunked)


@dataclass(frozen=True)
class Explained:
    """One list with where its scores came from: of each document its best chunk, in the order of the request."""

    explanation: Explanation
    order: list[int]  # documents best first, as a rerank request has them


class RerankService:
    """Ranks calls through the batcher."""

    def __init__(
        self, engine: RerankerEngine, batcher: Batcher, metrics: ServerMetrics, settings: ServeSettings
    ) -> None:
        self.engine, self.batcher, self.metrics, self.settings = engine, batcher, metrics, settings
        self._num_taken = 0

    @property
    def is_idle(self) -> bool:
        """Whether every request that was taken has its answer; between two steps of one the batcher has nothing to
        do.
        """
        return not self._num_taken and self.batcher.is_idle

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1

    async def rank(self, calls: Sequence[RerankCall], client: str, disconnect: Disconnect) -> list[RerankAnswer]:
        """The answers to the lists of one request; ``disconnect`` returns when its client has left, who then gets
        nothing.
        """
        with self._taken():
            return await self._rank(calls, client, disconnect)

    async def _rank(self, calls: Sequence[RerankCall], client: str, disconnect: Disconnect) -> list[RerankAnswer]:
        started = time.perf_counter()
        scored, tokenization = await self.score(calls, client, disconnect)
        answers = []
        for item in scored:
            ranked = self._ranked(item)
            if item.call.wants_highlights and ranked:
                ranked = await self._with_sentences(item, ranked, started + self.settings.request_seconds)
            seconds = {
                "queue": item.work.queue_seconds,
                "inference": item.work.inference_seconds,
                "tokenization": tokenization,
                "total": time.perf_counter() - started,
            }
            is_shortened = item.result.is_shortened or any(item.chunked.is_cut)
            answers.append(RerankAnswer(tuple(ranked), item.result.num_tokens, is_shortened, seconds))
        return answers

    async def score(
        self, calls: Sequence[RerankCall], client: str, disconnect: Disconnect
    ) -> tuple[list[Scored], float]:
        """Chunk, queue and wait; also the seconds that measuring and chunking took."""
        started = time.perf_counter()
        self._check(calls)
        for call in calls:
            await self._check_query(call.query)
        chunked = [await self._chunked(call) for call in calls]
        sizes = [estimated_tokens(call.query, item.passages) for call, item in zip(calls, chunked, strict=True)]
        for call, num_tokens in zip(calls, sizes, strict=True):
            if num_tokens > self.settings.max_list_tokens:
                most = self.settings.max_list_tokens
                raise Problem(
                    413, f"about {num_tokens} tokens; this server reads at most {most} of a list", field=call.field
                )
        tokenization = time.perf_counter() - started
        self.metrics.tokenization_seconds.observe(tokenization)
        lists = [(call.query, item.passages, size) for call, item, size in zip(calls, chunked, sizes, strict=True)]
        works = self.batcher.submit(client, lists)
        try:
            # whatever ends the waiting, what is still in the queue is taken out: nobody computes for a client that left
            results = await self._wait(works, disconnect)
        finally:
            for work in works:
                if work.future.cancel():
                    self.metrics.count("headrank_abandoned_total")
                elif not work.future.cancelled():
                    work.future.exception()  # a second failure of one request was seen, too
        scored = [Scored(*item) for item in zip(calls, chunked, works, results, strict=True)]
        self._count(scored)
        return scored, tokenization

    def _count(self, scored: Sequence[Scored]) -> None:
        num_tokens = sum(item.result.num_tokens for item in scored)
        self.metrics.input_tokens.observe(num_tokens)
        self.metrics.count("vllm:prompt_tokens_total", num_tokens)
        self.metrics.count("headrank_documents_total", sum(len(item.call.documents) for item in scored))
        self.metrics.count("headrank_documents_cut_total", sum(sum(item.chunked.is_cut) for item in scored))

    def _check(self, calls: Sequence[RerankCall]) -> None:
        """The limits that need no model."""
        num_documents = sum(len(call.documents) for call in calls)
        if num_documents > self.settings.max_documents:
            raise Problem(
                413,
                f"{num_documents} documents; this server ranks at most {self.settings.max_documents}",
                field=calls[0].field,
            )
        for call in calls:
            if not call.query.strip():
                raise Problem(422, "empty; give a query with at least one word", field="query")

    async def _check_query(self, query: str) -> None:
        """A query's tokens are paid for with every passage: one of thousands would keep everybody waiting."""
        most = self.settings.max_query_tokens
        num_bytes = len(query.encode("utf-8", "surrogatepass"))
        if num_bytes <= most:
            return
        is_long = num_bytes > _MOST_BYTES_PER_TOKEN * most
        if is_long or len((await asyncio.to_thread(self.engine.token_offsets, [query]))[0]) > most:
            raise Problem(413, f"longer than {most} tokens, the limit of this server; shorten it", field="query")

    async def _chunked(self, call: RerankCall) -> Chunked:
        """The passages to score; texts are tokenised, beside the event loop, only where one might not fit."""
        most = self.settings.max_chunks_per_doc
        limits = ChunkLimits(
            self.engine.room,
            self.engine.max_words,
            call.max_tokens_per_doc,
            min(most, call.max_chunks_per_doc or most),
            call.keeps_end,
        )
        if all(surely_fits(document, limits) for document in call.documents):
            return chunk_documents(call.documents, limits, self.engine.token_offsets)
        chunked = await asyncio.to_thread(chunk_documents, call.documents, limits, self.engine.token_offsets)
        if not call.may_cut and any(chunked.is_cut):
            place = chunked.is_cut.index(True)
            raise Problem(
                413, "longer than the model reads, and truncation is switched off", field=f"{call.field}[{place}]"
            )
        return chunked

    async def _wait(self, works: Sequence[Work], disconnect: Disconnect) -> list[ListScores]:
        """The results, unless the client leaves or the time is up before."""
        left = asyncio.ensure_future(disconnect())
        waiting: set[asyncio.Future[Any]] = {work.future for work in works}
        deadline = time.perf_counter() + self.settings.request_seconds
        try:
            while waiting:
                patience = max(0.0, deadline - time.perf_counter())
                done, _ = await asyncio.wait({left, *waiting}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise Problem(
                        503,
                        f"no answer within {self.settings.request_seconds:g} seconds; come back later",
                        retry_after=5,
                    )
                if left in done:
                    raise Problem(408, "the client closed the connection")
                if any(future.exception() is not None for future in done):
                    break
                waiting -= done
            return [work.future.result() for work in works if work.future.done()]
        finally:
            left.cancel()

    def _ranked(self, item: Scored) -> list[Ranked]:
        """Best first by the model's score; equal scores keep the order of the request. The threshold is on what is
        shown.
        """
        call, best, curve = item.call, item.best, None if item.call.wants_raw else self.engine.relevance
        scores = item.result.scores[best]
        shown = scores if curve is None else curve.of(scores)
        # by the raw score: the curve is flat in places, and would tie what the model tells apart
        order = _best_first(scores)
        if call.threshold is not None:
            order = [index for index in order if shown[index] >= call.threshold]
        counts = np.bincount([chunk.document for chunk in item.chunked.chunks], minlength=len(best))
        ranked = []
        for index in order[: call.top_n]:
            chunk = item.chunked.chunks[best[index]]
            ranked.append(
                Ranked(
                    index,
                    float(shown[index]),
                    None if curve is None else float(scores[index]),
                    item.chunked.is_cut[index],
                    (chunk.start, chunk.end) if counts[index] > 1 else None,
                )
            )
        return ranked

    async def explain(self, call: RerankCall, client: str, disconnect: Disconnect) -> Explained:
        """Score a list as ``rank`` does, then read it again token by token."""
        deadline = time.perf_counter() + self.settings.request_seconds
        with self._taken():
            [item], _ = await self.score([call], client, disconnect)
            explain = functools.partial(self.engine.explain, call.query, item.chunked.passages, item.best)
            found = await self.batcher.call(explain, deadline - time.perf_counter())
        scores = item.result.scores[item.best]
        # the served scores, so that this order is that of the answer: a document without a word is last in both
        return Explained(dataclasses.replace(found, scores=scores), _best_first(scores))

    async def _with_sentences(self, item: Scored, ranked: Sequence[Ranked], deadline: float) -> list[Ranked]:
        """The sentences of each document's best chunk."""
        chosen = [item.best[document.index] for document in ranked]
        # in the late layout passages are read apart: a few at a time bounds the memory, and lets other requests in
        # between
        step = _EXPLAINED_AT_A_TIME if self.engine.is_late else len(chosen)
        sentences: list[tuple[Sentence, ...]] = []
        for start in range(0, len(chosen), step):
            explain = functools.partial(
                self.engine.explain, item.call.query, item.chunked.passages, chosen[start : start + step]
            )
            found = await self.batcher.call(explain, deadline - time.perf_counter())
            sentences += [tuple(sentences_of(tokens)) for tokens in found.tokens]
        return [
            dataclasses.replace(document, sentences=of_one) for document, of_one in zip(ranked, sentences, strict=True)
        ]


def _best_first(scores: np.ndarray) -> list[int]:
    """Indices by score; equal scores keep the order of the request."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def estimated_tokens(query: str, passages: Sequence[tuple[str, str]]) -> int:
    """About how many tokens a list has; cheap, and never 0."""
    # bytes and not characters: a Chinese character is about a token, a Latin one a quarter
    num_bytes = sum(len(title) + len(text.encode("utf-8", "surrogatepass")) for title, text in passages)
    return _EXTRA_TOKENS + (len(query) + num_bytes) // _BYTES_PER_TOKEN
