"""What a person sees of a study that is not at work: every phase with its state, the reason, and the time it took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from headrank.experiments.display import duration
from headrank.experiments.phases import STAMPS, Phase
from headrank.experiments.plan_study import StudyPlan
from headrank.experiments.processes import holder_of_lock


def overview(planned: StudyPlan) -> list[RenderableType]:
    """A table of phases and a line on what comes next."""
    phases, output = planned.phases, planned.plan.output
    reasons = phase_states(phases)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns: tuple[tuple[str, JustifyMethod], ...] = (("", "left"), ("phase", "left"), ("took", "right"), ("", "left"))
    for header, justify in columns:
        overflow: OverflowMethod = "fold" if header == "" else "ellipsis"
        table.add_column(header, justify=justify, overflow=overflow)
    for phase in phases:
        reason, seconds = reasons[phase.name], phase.seconds_before()
        mark = Text("✓", style="green") if reason is None else Text("·", style="yellow")
        took = duration(seconds) if seconds else ""
        table.add_row(
            mark, Text(phase.name, style="dim" if reason is None else "bold"), took, Text(reason or "done", style="dim")
        )
    return [table, Text(_summary(phases, reasons, output))]


def phase_states(phases: Sequence[Phase]) -> dict[str, str | None]:
    """Phase -> None where it is done, else why not: its own reason, or the phase that has to be done before it can
    be told.
    """
    reasons: dict[str, str | None] = {}
    for phase in phases:
        reason = phase.why_stale()
        waits = [need for need in phase.needs if reasons.get(need) is not None]
        reasons[phase.name] = reason if reason is not None or not waits else f"after {waits[0]}"
    return reasons


def _summary(phases: Sequence[Phase], reasons: dict[str, str | None], output: Path) -> str:
    """'12 of 20 phases done in runs/study; next: train/seed-1; what is left took 2 h 7 min the last time'."""
    left = [phase for phase in phases if reasons[phase.name] is not None]
    text = f"{len(phases) - len(left)} of {len(phases)} phases done in {output}"
    holder = holder_of_lock(output / STAMPS / "study.lock")
    if holder is not None:
        text += f"; process {holder} is at work"
    if left:
        text += f"; next: {left[0].name}"
        seconds = [phase.seconds_expected() for phase in left]
        if all(seconds):
            text += f"; what is left took {duration(sum(value or 0 for value in seconds))} the last time"
    return text
