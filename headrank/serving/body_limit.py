"""Bodies that are too large or too slow end before they are read whole: 413 and 408."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrank.serving.problems import Problem, problem_response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class BodyLimit:
    """ASGI middleware. A declared length is judged before the first byte, an undeclared one while it arrives."""

    def __init__(self, app: Application, max_bytes: int, seconds: float) -> None:
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await problem_response(self._too_large())(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # from here on this waits for the client to leave
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.seconds)
            except asyncio.TimeoutError:
                raise Problem(408, f"the body did not arrive within {self.seconds:g} seconds") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            return message

        return limited

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"larger than {self.max_bytes} bytes, the limit of this server; send fewer or shorter documents",
            field="body",
        )
