"""Waiting requests of many clients: who got least is served next, so that nobody's thousand requests starve
another's one.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Waiting(Protocol):
    """What the queue needs to know of a request."""

    client: str
    num_tokens: int

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the answer any more."""


class FairQueue:
    """First come, first served within a client; between clients by the tokens served so far, counted while they wait.

    A client that comes back starts level with the one that got least: idling saves nothing up.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Waiting]] = {}
        self._served: dict[str, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, item: Waiting) -> None:
        """Put a request behind the others of its client."""
        if item.client not in self._waiting:
            self._served[item.client] = min(self._served.values(), default=0)
            self._waiting[item.client] = deque()
        self._waiting[item.client].append(item)
        self.num_tokens += item.num_tokens

    def take(self, budget: int) -> list[Waiting]:
        """The next requests that fit ``budget`` tokens together; the first is taken whatever its size, and none is
        overtaken.

        Requests that nobody waits for any more are dropped on the way.
        """
        batch: list[Waiting] = []
        total = 0
        while self._waiting:
            client = min(self._waiting, key=lambda name: self._served[name])
            item = self._waiting[client][0]
            if batch and not item.is_gone and total + item.num_tokens > budget:
                break
            self._pop(client)
            if item.is_gone:
                continue
            batch.append(item)
            total += item.num_tokens
            if client in self._served:
                self._served[client] += item.num_tokens
        return batch

    def _pop(self, client: str) -> None:
        queue = self._waiting[client]
        self.num_tokens -= queue.popleft().num_tokens
        if not queue:
            del self._waiting[client], self._served[client]
