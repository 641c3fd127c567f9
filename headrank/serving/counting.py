"""ASGI middleware that counts (and, where asked for, logs) rerank requests, and closes connections while the server
drains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any

from headrank.serving.body_limit import Application, Message, Receive, Send
from headrank.serving.state import ServerState

_log = logging.getLogger(__name__)
RERANK_PATHS = frozenset({"/v2/rerank", "/v1/rerank", "/rerank", "/v1/score", "/score"})


class Counting:
    """One per application."""

    def __init__(self, app: Application, server: ServerState) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["path"] in RERANK_PATHS:
                    self._note(scope, message["status"], time.perf_counter() - started)
                if self.server.phase == "draining":
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, noted if scope["type"] == "http" else send)

    def _note(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        self.server.metrics.answered(status, seconds)
        if self.server.settings.logs_requests:
            num_documents = scope.get("state", {}).get("num_documents")
            size = "" if num_documents is None else f", {num_documents} documents"
            _log.info("%s %s %d%s, %.0f ms", scope["method"], scope["path"], status, size, 1000 * seconds)
