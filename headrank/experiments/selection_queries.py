"""A few queries of every topic: what head selection looks at when all training queries would take too long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from headrank.errors import InputError
from headrank.files import atomic_write, read_lines


def write_selection_queries(queries: Path, per_topic: int, output: Path) -> None:
    """Keep the first ``per_topic`` lines of every topic, the second column of a file of query ids."""
    seen: Counter[str] = Counter()
    kept = []
    for number, line in read_lines(queries):
        query_id, _, topic = line.partition("\t")
        if not topic.strip():
            raise InputError(
                f"{queries}:{number}: {query_id!r} has no topic in a second column; leave queries_per_topic out"
            )
        if seen[topic] < per_topic:
            kept.append(line)
        seen[topic] += 1
    with atomic_write(output) as stream:
        stream.writelines(f"{line}\n" for line in kept)
