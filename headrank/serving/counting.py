"""ASGI middleware that counts rerank requests by status and, while the server drains, closes connections after their answer."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from headrank.serving.body_limit import Application, Message, Receive, Send
from headrank.serving.state import ServerState

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
                    self.server.metrics.answered(message["status"], time.perf_counter() - started)
                if self.server.phase == "draining":
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, noted if scope["type"] == "http" else send)
