"""Training runs compared: what each started from, reached and ended at on its held-out contexts. Tunings are read
off this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import quote, read_lines
from headrank.reports.grids import Grid
from headrank.reports.table_text import to_markdown
from headrank.reports.training_curves import find_training_logs, read_training_log

COLUMNS = (
    "run",
    "steps",
    "NDCG@10 before",
    "after",
    "change",
    "preference accuracy before",
    "after",
    "change",
    "contexts",
)
_MEASURES = ("ndcg@10", "preference_accuracy")


@dataclass(frozen=True)
class TrainingRow:
    """One run: held-out measures before its first and after its last step. NaN: measured as such; ``contexts`` None:
    not logged.
    """

    name: str
    folder: Path
    steps: int
    ndcg: tuple[float, float]
    accuracy: tuple[float, float]
    contexts: int | None


def training_rows(folder: Path) -> list[TrainingRow]:
    """A row for every finished evaluation pair below ``folder``; runs without held-out contexts have none."""
    logs = find_training_logs(folder)
    if not logs:
        raise InputError(
            f"{folder}: no metrics.jsonl below it; train with 'pretrain_headrank.py --save DIR --valid-data-path DIR'"
        )
    rows = []
    for log in logs:
        evaluations = list(_evaluations(log))
        if len(evaluations) < 2:
            continue
        name = _run_name(log.parent, folder)
        first, last = evaluations[0], evaluations[-1]
        ndcg, accuracy = ((first[measure], last[measure]) for measure in _MEASURES)
        rows.append(TrainingRow(name, log.parent, last["iteration"], ndcg, accuracy, last["contexts"]))
    if not rows:
        raise InputError(
            f"{folder}: no run below it was evaluated twice; give --valid-data-path and --eval-interval when training"
        )
    return rows


def _run_name(training: Path, folder: Path) -> str:
    """The run's folder; 'seed-1' and not 'seed-1/round-1/train', where a study has put it."""
    name = training.relative_to(folder).as_posix()
    return (
        (name.removesuffix("train").removesuffix("/").removesuffix("round-1").removesuffix("/") or name)
        if name != "."
        else folder.name
    )


def _evaluations(log: Path) -> Iterator[dict[str, Any]]:
    """The held-out evaluations of one run; a measure that is missing or no number is an InputError that names its
    line.
    """
    if "valid" not in read_training_log(log):  # which also refuses broken lines, but for a torn last one
        return
    for number, line in read_lines(log):
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, dict) or row.get("event") != "valid":
            continue
        for measure in _MEASURES:
            if type(row.get(measure)) not in (int, float):
                found = quote(json.dumps(row.get(measure)))
                raise InputError(
                    f"{log}:{number}: {measure!r} is no number but {found}; delete the line or evaluate the run again"
                )
        contexts = row.get("contexts")
        is_counted = isinstance(contexts, (int, float)) and math.isfinite(contexts)
        yield {**row, "iteration": int(row["iteration"]), "contexts": int(row["contexts"]) if is_counted else None}


def training_table(rows: list[TrainingRow]) -> str:
    """Markdown, best change of NDCG@10 first; ties by name; what is not known or not finite is '-' and comes last."""
    lines = []
    for row in sorted(rows, key=_place):
        cells = [row.name, str(row.steps)]
        for before, after in (row.ndcg, row.accuracy):
            cells += [_percent(before), _percent(after), _percent(after - before, "+")]
        lines.append((*cells, "-" if row.contexts is None else str(row.contexts)))
    return to_markdown(Grid("", COLUMNS, tuple(lines)))


def _place(row: TrainingRow) -> tuple[bool, float, str]:
    change = row.ndcg[1] - row.ndcg[0]
    return (False, -change, row.name) if math.isfinite(change) else (True, 0.0, row.name)


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" if math.isfinite(value) else "-"
