"""From a call to its answer: limits, the queue, the order of the documents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrank.reranking.rerank_requests import ListScores
from headrank.serving.batcher import Batcher, Work
from headrank.serving.call import Ranked, RerankAnswer, RerankCall
from headrank.serving.problems import Problem
from headrank.serving.server_metrics import ServerMetrics
from headrank.serving.settings import ServeSettings

_BYTES_PER_TOKEN = 4  # of the estimate for the budget; answers count real tokens
_EXTRA_TOKENS = 16  # of a query's branch
Disconnect = Callable[[], Awaitable[Any]]


class RerankService:
    """Ranks calls through the batcher."""

    def __init__(self, batcher: Batcher, metrics: ServerMetrics, settings: ServeSettings) -> None:
        self.batcher, self.metrics, self.settings = batcher, metrics, settings

    async def rank(self, calls: Sequence[RerankCall], client: str, disconnect: Disconnect) -> list[RerankAnswer]:
        """The answers to the lists of one request; ``disconnect`` returns when its client has left, who then gets nothing."""
        started = time.perf_counter()
        self._check(calls)
        measured = [(call.query, call.documents, estimated_tokens(call)) for call in calls]
        tokenization = time.perf_counter() - started
        self.metrics.tokenization_seconds.observe(tokenization)
        works = self.batcher.submit(client, measured)
        try:
            results = await self._wait(works, disconnect)
        finally:
            for work in works:
                if work.future.cancel():
                    self.metrics.count("headrank_abandoned_total")
                elif not work.future.cancelled():
                    work.future.exception()  # a second failure of one request was seen, too
        answers = []
        for call, work, result in zip(calls, works, results, strict=True):
            seconds = {
                "queue": work.queue_seconds,
                "inference": work.inference_seconds,
                "tokenization": tokenization,
                "total": time.perf_counter() - started,
            }
            answers.append(ranked_answer(call, result, seconds))
            self.metrics.count("headrank_documents_total", len(call.documents))
        num_tokens = sum(answer.num_tokens for answer in answers)
        self.metrics.input_tokens.observe(num_tokens)
        self.metrics.count("vllm:prompt_tokens_total", num_tokens)
        return answers

    def _check(self, calls: Sequence[RerankCall]) -> None:
        """The limits that need no model."""
        num_documents = sum(len(call.documents) for call in calls)
        if num_documents > self.settings.max_documents:
            raise Problem(413, f"{num_documents} documents; this server ranks at most {self.settings.max_documents}", field=calls[0].field)
        for call in calls:
            if not call.query.strip():
                raise Problem(422, "empty; give a query with at least one word", field="query")
            tokens = estimated_tokens(call)
            if tokens > self.settings.max_list_tokens:
                raise Problem(
                    413, f"about {tokens} tokens; this server reads at most {self.settings.max_list_tokens} of a list", field=call.field
                )

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
                    raise Problem(503, f"no answer within {self.settings.request_seconds:g} seconds; come back later", retry_after=5)
                if left in done:
                    raise Problem(408, "the client closed the connection")
                if any(future.exception() is not None for future in done):
                    break
                waiting -= done
            return [work.future.result() for work in works if work.future.done()]
        finally:
            left.cancel()


def estimated_tokens(call: RerankCall) -> int:
    """About how many tokens a call has; cheap, and never 0."""
    num_bytes = sum(len(title) + len(text.encode("utf-8", "surrogatepass")) for title, text in call.documents)
    return _EXTRA_TOKENS + (len(call.query) + num_bytes) // _BYTES_PER_TOKEN


def ranked_answer(call: RerankCall, result: ListScores, seconds: dict[str, float]) -> RerankAnswer:
    """Best first; equal scores keep the order of the request."""
    order = sorted(range(len(call.documents)), key=lambda index: (-result.scores[index], index))[: call.top_n]
    ranked = tuple(Ranked(index, float(result.scores[index])) for index in order)
    return RerankAnswer(ranked, result.num_tokens, result.is_shortened, seconds)
