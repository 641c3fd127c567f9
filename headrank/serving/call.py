"""What every dialect is translated into, and what it translates its answer from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RerankCall:
    """One list to rank. ``documents`` are (title, text); None leaves a choice to the server."""

    query: str
    documents: tuple[tuple[str, str], ...]
    top_n: int | None = None
    field: str = "documents"  # the name of the documents in this dialect, for errors


@dataclass(frozen=True)
class Ranked:
    """One document of an answer."""

    index: int
    score: float
    is_cut: bool = False


@dataclass(frozen=True)
class RerankAnswer:
    """Documents best first, cut at top_n; ties keep the order of the request."""

    ranked: tuple[Ranked, ...]
    num_tokens: int
    is_shortened: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)  # queue, inference, tokenization, total

    @property
    def headers(self) -> dict[str, str]:
        """Where the time went, in TEI's headers (milliseconds)."""
        times = {f"x-{name}-time": str(round(1000 * value)) for name, value in self.seconds.items()}
        return {"x-compute-tokens": str(self.num_tokens), **times}


Json = dict[str, Any]
