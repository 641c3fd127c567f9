"""Continuous batching: whenever the model is free, the waiting requests that fit the token budget are computed
together.

One thread computes. Lists are never mixed: the engine gets them as lists and gives the scores that each has alone. A
batch that fails is halved until the request at fault is alone and fails alone; a batch that runs out of memory is
halved and so is the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from headrank.errors import InputError
from headrank.reranking.rerank_requests import ListScores
from headrank.serving.fair_queue import FairQueue
from headrank.serving.problems import Problem, place_of
from headrank.serving.server_metrics import ServerMetrics

_log = logging.getLogger(__name__)
_SMALLEST_BUDGET = 256
_CLEAN_BATCHES_TO_GROW = 64  # after this many batches without trouble a halved budget doubles again
Result = TypeVar("Result")
Passages = Sequence[tuple[str, str]]


class Scorer(Protocol):
    """What computes; called in one thread."""

    def score(self, lists: Sequence[tuple[str, Passages]]) -> list[ListScores]:
        """The scores of each list, bit by bit those that it has alone."""

    def free_memory(self) -> None:
        """Give back what can be given back after an allocation failed."""


@dataclass(eq=False)
class Work:
    """One list that waits. ``num_tokens`` is an estimate: the budget need not be exact."""

    client: str
    query: str
    passages: Passages
    num_tokens: int
    future: asyncio.Future[ListScores]
    arrived: float = field(default_factory=time.perf_counter)
    queue_seconds: float = 0.0
    inference_seconds: float = 0.0

    @property
    def is_gone(self) -> bool:
        """Whether the client left or its time was up."""
        return self.future.done()


class Batcher:
    """The queue and the loop that empties it."""

    def __init__(self, scorer: Scorer, metrics: ServerMetrics, *, budget: int, max_queue: int) -> None:
        self.scorer, self.metrics, self.max_queue = scorer, metrics, max_queue
        self.budget = self.full_budget = budget
        self.running = self._calls = 0
        self._queue = FairQueue()
        self._arrived = asyncio.Event()
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrank-model")
        self._clean_batches = 0
        self._tokens_per_second = 0.0
        metrics.ask("te_queue_size", "Requests that wait for a batch.", lambda: len(self._queue))
        metrics.ask("vllm:num_requests_waiting", "Requests that wait for a batch.", lambda: len(self._queue))
        metrics.ask("vllm:num_requests_running", "Requests in the batch that is being computed.", lambda: self.running)
        metrics.ask(
            "headrank_batch_token_budget",
            "Tokens of a batch at most; halved by running out of memory.",
            lambda: self.budget,
        )

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is computed."""
        return not len(self._queue) and not self.running and not self._calls

    def submit(self, client: str, lists: Sequence[tuple[str, Passages, int]]) -> list[Work]:
        """Queue lists of one request, all or none; a full queue is a 429 that says when to come back."""
        # a request with more lists than the queue holds is let in when the queue is empty: otherwise it could never be
        if len(self._queue) + len(lists) > max(self.max_queue, len(lists)):
            raise Problem(
                429,
                f"{len(self._queue)} requests are waiting, the limit; come back later",
                retry_after=self._patience(),
            )
        loop = asyncio.get_running_loop()
        works = [
            Work(client, query, passages, num_tokens, loop.create_future()) for query, passages, num_tokens in lists
        ]
        for work in works:
            self._queue.add(work)
        self._arrived.set()
        return works

    def _patience(self) -> int:
        """Seconds until the queue of now is empty, at the speed of the last batches."""
        seconds = self._queue.num_tokens / self._tokens_per_second if self._tokens_per_second else 1.0
        return int(min(60.0, max(1.0, seconds)))

    async def call(self, compute: Callable[[], Result], seconds: float) -> Result:
        """Run something else on the model's thread, between two batches; it fails like a request that is alone in its
        batch.

        One at a time stands before the thread, so that a batch waits for one at most; whose turn has not come within
        ``seconds`` gets a 503.
        """
        if self._calls >= self.max_queue:
            raise Problem(
                429, f"{self._calls} explanations are waiting, the limit; come back later", retry_after=self._patience()
            )
        self._calls += 1
        try:
            return await self._call_in_turn(compute, seconds)
        finally:
            self._calls -= 1

    async def _call_in_turn(self, compute: Callable[[], Result], seconds: float) -> Result:
        try:
            await asyncio.wait_for(self._turn.acquire(), seconds)
        except asyncio.TimeoutError:
            raise Problem(
                503, "no time for an explanation within the request's limit; come back later", retry_after=5
            ) from None
        try:
            attempt = asyncio.get_running_loop().run_in_executor(self._thread, compute)
            # waited for and not awaited: a cancelled caller must not cancel the thread's work, which cannot be stopped
            await asyncio.wait([attempt])
            if (error := attempt.exception()) is not None:
                raise _problem_of(error)
            return attempt.result()
        finally:
            self._turn.release()

    async def run(self) -> None:
        """Serve until cancelled; what is left then gets a 503."""
        try:
            while True:
                await self._arrived.wait()
                batch = cast("list[Work]", self._queue.take(self.budget))
                if not batch:
                    self._arrived.clear()
                    continue
                await self._serve(batch)
        finally:
            for work in cast("list[Work]", self._queue.take(1 << 62)):
                _fail(work, Problem(503, "the server is stopping", retry_after=1))
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, batch: list[Work]) -> None:
        started = time.perf_counter()
        num_tokens = sum(work.num_tokens for work in batch)
        self.metrics.count("headrank_batches_total")
        self.metrics.batch_requests.observe(len(batch))
        self.metrics.batch_tokens.observe(num_tokens)
        for work in batch:
            work.queue_seconds = started - work.arrived
            self.metrics.waited(work.queue_seconds)
        self.running = len(batch)
        try:
            await self._attempt(batch)
        finally:
            self.running = 0
        seconds = time.perf_counter() - started
        for work in batch:
            work.inference_seconds = seconds
            self.metrics.inference_seconds.observe(seconds)
        speed = num_tokens / max(seconds, 1e-6)
        self._tokens_per_second = speed if not self._tokens_per_second else 0.8 * self._tokens_per_second + 0.2 * speed
        self._clean_batches += 1
        if self.budget < self.full_budget and self._clean_batches >= _CLEAN_BATCHES_TO_GROW:
            self.budget, self._clean_batches = min(self.full_budget, 2 * self.budget), 0

    async def _attempt(self, batch: list[Work]) -> None:
        """Compute a batch; halve it when it fails, until what fails is one request."""
        lists = [(work.query, work.passages) for work in batch]
        attempt = asyncio.get_running_loop().run_in_executor(self._thread, self.scorer.score, lists)
        await asyncio.wait([attempt])
        error = attempt.exception()
        if error is None:
            for work, scores in zip(batch, attempt.result(), strict=True):
                # its client may have left while the batch was computed
                if not work.future.done():
                    work.future.set_result(scores)
            return
        if is_out_of_memory(error):
            await self._after_out_of_memory(len(batch))
        # halved until the request that fails is alone: one bad list costs its neighbours time, not their answers
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._attempt(batch[:middle])
            await self._attempt(batch[middle:])
            return
        self.metrics.count("headrank_failed_alone_total")
        _fail(batch[0], _problem_of(error))

    async def _after_out_of_memory(self, num_requests: int) -> None:
        self.metrics.count("headrank_out_of_memory_total")
        self._clean_batches = 0
        if num_requests > 1:
            self.budget = max(_SMALLEST_BUDGET, self.budget // 2)
        _log.warning("out of memory in a batch of %d requests; the budget is now %d tokens", num_requests, self.budget)
        await asyncio.get_running_loop().run_in_executor(self._thread, self.scorer.free_memory)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch has no type for it)."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no class of its own for it
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _problem_of(error: BaseException) -> Problem:
    """What the client hears. The log gets the place in the code and no message: messages may quote texts."""
    if isinstance(error, InputError):
        return Problem(422, str(error))
    if is_out_of_memory(error):
        return Problem(413, "this list does not fit the server's memory even alone; send fewer or shorter documents")
    _log.error("a request failed alone: %s", place_of(error))
    return Problem(500, "the server could not compute this request; its log says where")


def _fail(work: Work, problem: Problem) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        work.future.set_exception(problem)
