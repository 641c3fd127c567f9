"""Counters, gauges and histograms in Prometheus' text format, under exactly the names they are given.

The client library appends _total to every counter, and the dashboards of text-embeddings-inference ask for
te_request_count; so these few lines are ours. They are changed on the event loop only and need no lock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass
class Metric:
    """One name with its help text; ``kind`` is counter or gauge."""

    name: str
    kind: str
    help: str
    values: dict[Labels, float] = field(default_factory=dict)
    read: Callable[[], float] | None = None  # a gauge or counter that is asked when it is scraped

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Count."""
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0.0) + amount

    def lines(self) -> Iterable[str]:
        """The samples."""
        values = {(): self.read()} if self.read is not None else self.values or {(): 0.0}
        for labels, value in values.items():
            yield f"{self.name}{_labels(labels)} {_number(value)}"


@dataclass
class Histogram:
    """How often values fell under each bound."""

    name: str
    help: str
    bounds: Sequence[float]
    kind: str = "histogram"
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Note one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> Iterable[str]:
        """Cumulative buckets, sum and count."""
        below = 0
        for bound, count in zip([*self.bounds, math.inf], self.counts, strict=True):
            below += count
            yield f"{self.name}_bucket{_labels((('le', _number(bound)),))} {below}"
        yield f"{self.name}_sum {_number(self.total)}"
        yield f"{self.name}_count {below}"


def exposition(metrics: Iterable[Metric | Histogram]) -> str:
    """The page that is scraped."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    """Sorted and quoted, or nothing."""
    if not labels:
        return ""
    quoted = (f'{name}="{_escaped(value)}"' for name, value in labels)
    return "{" + ",".join(quoted) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def counters(names: Mapping[str, str]) -> dict[str, Metric]:
    """Counters by name."""
    return {name: Metric(name, "counter", text) for name, text in names.items()}
