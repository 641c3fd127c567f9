"""What a training run logged: metrics.jsonl as series by event and name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from headrank.errors import InputError
from headrank.formats import read_lines

METRICS_LOG = "metrics.jsonl"
Series = dict[str, list[tuple[int, float]]]  # name -> (iteration, value)


def read_training_log(path: str | os.PathLike[str]) -> dict[str, Series]:
    """event -> name -> (iteration, value) in file order; a torn last line is skipped, other broken lines are errors."""
    events: dict[str, Series] = {}
    lines = list(read_lines(path))
    for place, (number, line) in enumerate(lines):
        try:
            row = json.loads(line)
            event, iteration = str(row["event"]), int(row["iteration"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            if place == len(lines) - 1:
                break
            raise InputError(
                f"{path}:{number}: not a line of a training log; expected an object with 'event' and 'iteration'"
            ) from None
        for name, value in row.items():
            if name not in ("event", "iteration") and isinstance(value, (int, float)) and not isinstance(value, bool):
                events.setdefault(event, {}).setdefault(name, []).append((iteration, float(value)))
    return events


def find_training_logs(folder: str | os.PathLike[str]) -> list[Path]:
    """All metrics.jsonl below a folder, in a fixed order."""
    return sorted(Path(folder).rglob(METRICS_LOG))
