"""Latency against effectiveness: which methods no other method beats on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CostPoint:
    """One method of one model: seconds per query, effectiveness, and what to write beside the mark."""

    seconds: float
    value: float
    model: str
    method: str


def pareto_frontier(points: Sequence[CostPoint]) -> list[CostPoint]:
    """The points that no other point dominates, fastest first.

    A point is dominated when another is at least as fast and at least as good, and better in one of the two. Points
    equal in both are all kept.
    """
    kept = [
        point
        for point in points
        if not any(
            other.seconds <= point.seconds
            and other.value >= point.value
            and (other.seconds < point.seconds or other.value > point.value)
            for other in points
        )
    ]
    return sorted(kept, key=lambda point: (point.seconds, point.value))
