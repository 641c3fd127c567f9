"""Training runs side by side: what each started from, reached and ended at on its held-out contexts. Tunings are read off this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrank.errors import InputError
from headrank.evaluation.training_curves import find_training_logs, read_training_log

COLUMNS = ("run", "steps", "NDCG@10 before", "after", "change", "preference accuracy before", "after", "change", "contexts")


@dataclass(frozen=True)
class TrainingRow:
    """One run: held-out measures before its first and after its last step."""

    name: str
    steps: int
    ndcg: tuple[float, float]
    accuracy: tuple[float, float]
    contexts: int


def training_rows(folder: Path) -> list[TrainingRow]:
    """A row for every finished evaluation pair below ``folder``; runs without held-out contexts have none."""
    logs = find_training_logs(folder)
    if not logs:
        raise InputError(f"{folder}: no metrics.jsonl below it; train with 'pretrain_headrank.py --save DIR --valid-data-path DIR'")
    rows = []
    for log in logs:
        valid = read_training_log(log).get("valid", {})
        ndcg, accuracy = valid.get("ndcg@10", []), valid.get("preference_accuracy", [])
        if len(ndcg) < 2 or len(accuracy) < 2:
            continue
        name = str(log.parent.relative_to(folder)) if log.parent != folder else folder.name
        ends = (ndcg[0][1], ndcg[-1][1]), (accuracy[0][1], accuracy[-1][1])
        rows.append(TrainingRow(name, ndcg[-1][0], *ends, int(valid["contexts"][-1][1])))
    if not rows:
        raise InputError(f"{folder}: no run below it was evaluated twice; give --valid-data-path and --eval-interval when training")
    return rows


def training_table(rows: list[TrainingRow]) -> str:
    """Markdown, best change of NDCG@10 first; ties by name."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "|".join(["---"] + ["---:"] * (len(COLUMNS) - 1)) + "|"]
    for row in sorted(rows, key=lambda row: (-(row.ndcg[1] - row.ndcg[0]), row.name)):
        cells = [row.name, str(row.steps)]
        for before, after in (row.ndcg, row.accuracy):
            cells += [f"{100 * before:.1f}", f"{100 * after:.1f}", f"{100 * (after - before):+.1f}"]
        lines.append("| " + " | ".join([*cells, str(row.contexts)]) + " |")
    return "\n".join(lines) + "\n"
