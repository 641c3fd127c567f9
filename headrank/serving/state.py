"""The life of a server: loading, ready, draining, and what exists in each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from headrank.errors import InputError
from headrank.serving.access import ApiKeys
from headrank.serving.batcher import Batcher
from headrank.serving.engine import RerankerEngine
from headrank.serving.problems import Problem
from headrank.serving.server_metrics import ServerMetrics
from headrank.serving.service import RerankService
from headrank.serving.settings import ServeSettings

_log = logging.getLogger(__name__)
LoadEngine = Callable[[ServeSettings], RerankerEngine]


class ServerState:
    """Loads the model beside the event loop, so that /health answers meanwhile."""

    def __init__(self, settings: ServeSettings, load: LoadEngine) -> None:
        self.settings, self._load = settings, load
        self.keys = ApiKeys.read(settings.api_key_file)
        self.metrics = ServerMetrics()
        self.phase = "loading"
        self.engine: RerankerEngine | None = None
        self.service: RerankService | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to load; called on the event loop."""
        self._tasks.append(asyncio.create_task(self._serve()))

    async def _serve(self) -> None:
        loading = asyncio.get_running_loop().run_in_executor(None, self._load, self.settings)
        # in a thread: the port answers /health and /ready while the model loads
        await asyncio.wait([loading])
        self.failure = loading.exception()
        if self.failure is not None:
            self.phase = "failed"
            self.on_failure()
            return
        self.engine = loading.result()
        budget = self.settings.max_batch_tokens or self.engine.default_batch_tokens
        batcher = Batcher(self.engine, self.metrics, budget=budget, max_queue=self.settings.max_queue)
        self.engine.show_usage(self.metrics)
        self.service = RerankService(self.engine, batcher, self.metrics, self.settings)
        if self.phase == "loading":
            self.phase = "ready"
            _log.info("ready: %s", self.engine.reranker)
        await batcher.run()

    def ready(self) -> tuple[RerankService, RerankerEngine]:
        """What serves, or a 503 that says why nothing does."""
        if self.phase != "ready" or self.service is None or self.engine is None:
            words = {"loading": "the model is being loaded", "draining": "the server is about to stop"}
            raise Problem(
                503,
                words.get(self.phase, "the model could not be loaded"),
                retry_after=5 if self.phase == "loading" else 1,
            )
        return self.service, self.engine

    async def drain(self) -> bool:
        """Take nothing new and wait for what was taken; True when nothing was left behind."""
        self.phase = "draining"
        waited, step = 0.0, 0.05
        while self.service is not None and not self.service.is_idle:
            if waited >= self.settings.drain_seconds:
                return False
            await asyncio.sleep(step)
            waited += step
        await asyncio.sleep(step)  # the answers of the last batch are on their way
        return True

    async def stop(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def raise_failure(self) -> None:
        """What kept the model from loading, as the command's error."""
        if isinstance(self.failure, InputError):
            raise InputError(str(self.failure)) from self.failure
        if self.failure is not None:
            raise self.failure
