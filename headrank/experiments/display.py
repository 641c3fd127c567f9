"""What a person sees of a study at work: a live list on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from headrank.experiments.phases import Phase
from headrank.experiments.processes import RunningPhase

MARKS = {
    "done": "[green]✓[/]",
    "valid": "[dim green]✓[/]",
    "failed": "[red]✗[/]",
    "blocked": "[red]·[/]",
    "stopped": "[yellow]◼[/]",
}
MAX_WAITING = 5  # phases shown of those that still wait
LINES_OF_A_FAILURE = 15


def duration(seconds: float) -> str:
    """For people: 0.4 s, 12 s, 3 min 5 s, 2 h 7 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class PlainDisplay:
    """One line per event, for logs, pipes and CI."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def _say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201 - the display is the one place that writes to the screen

    def begin(self, phases: Sequence[Phase], states: dict[str, str]) -> None:
        """Nothing: the first phase says its own name."""

    def started(self, running: RunningPhase, reason: str) -> None:
        """Name, reason and log."""
        self._say(f"[{running.phase.name}] started ({reason}); log: {running.log}")

    def skipped(self, phase: Phase) -> None:
        """Name only."""
        self._say(f"[{phase.name}] done before")

    def ended(self, running: RunningPhase, state: str) -> None:
        """How it ended; the last lines of its log where it failed, its output where that is for people."""
        name, took = running.phase.name, duration(running.seconds)
        if state == "failed":
            self._say(f"[{name}] failed with exit code {running.process.returncode} after {took}; see {running.log}")
            self._say(_indented(_output(running)[-LINES_OF_A_FAILURE:]))
            return
        self._say(f"[{name}] {'saved and stopped' if state == 'stopped' else state} after {took}")
        if running.phase.prints and state == "done":
            self._say(_indented(_output(running)))

    def tick(self, running: Sequence[RunningPhase]) -> None:
        """Nothing."""

    def stopping(self, times: int) -> None:
        """What happens now, and what asking again does."""
        self._say(_STOPPING[min(times, 3)])

    def end(self) -> None:
        """Nothing."""


_STOPPING = {
    1: "stopping: trainings save a checkpoint first; once more ends them without",
    2: "ending everything now; once more kills",
    3: "killing",
}


class LiveDisplay(PlainDisplay):
    """The same events above a list that moves: what runs and where it stands, what waits, how far the study is."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.phases: Sequence[Phase] = ()
        self.states: dict[str, str] = {}
        self.running: Sequence[RunningPhase] = ()
        self.expected: dict[str, float | None] = {}
        self._spinner = Spinner("dots", style="cyan")
        # last, because rich asks for the first picture at once; transient, because what ended is printed above for good
        self.live = Live(console=console, refresh_per_second=8, get_renderable=self._render, transient=True)

    def _say(self, text: str) -> None:
        self.console.print(Text(text))

    def begin(self, phases: Sequence[Phase], states: dict[str, str]) -> None:
        """Show the list."""
        self.phases, self.states = phases, states
        self.expected = {phase.name: phase.seconds_expected() for phase in phases}
        self.live.start()

    def started(self, running: RunningPhase, reason: str) -> None:
        """The list shows it."""

    def skipped(self, phase: Phase) -> None:
        """A dim tick."""
        self.console.print(f"{MARKS['valid']} [dim]{escape(phase.name)}: done before[/]", highlight=False)

    def ended(self, running: RunningPhase, state: str) -> None:
        """A tick with the time, or the plain lines of a failure."""
        if state == "failed":
            self.console.print(f"{MARKS[state]} [bold red]{escape(running.phase.name)}[/]", highlight=False)
            super().ended(running, state)
            return
        self.console.print(
            f"{MARKS[state]} [bold]{escape(running.phase.name)}[/] {duration(running.seconds)}", highlight=False
        )
        if running.phase.prints and state == "done":
            self.console.print(Text(_indented(_output(running)), style="dim"))

    def tick(self, running: Sequence[RunningPhase]) -> None:
        """Remember what runs; the list draws itself."""
        self.running = list(running)

    def end(self) -> None:
        """Take the list away; the lines above it stay."""
        self.live.stop()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for running in self.running:
            before = self.expected.get(running.phase.name)
            took = duration(running.seconds) + (f" of about {duration(before)}" if before else "")
            table.add_row(
                self._spinner, Text(running.phase.name, style="bold"), took, Text(running.last_line(), style="dim")
            )
        waiting = [phase.name for phase in self.phases if self.states[phase.name] == "waiting"]
        for name in waiting[:MAX_WAITING]:
            table.add_row(Text("·", style="dim"), Text(name, style="dim"), "", "")
        if len(waiting) > MAX_WAITING:
            table.add_row("", Text(f"and {len(waiting) - MAX_WAITING} more", style="dim"), "", "")
        return Group(table, self._progress())

    def _progress(self) -> RenderableType:
        """A bar over phases, the time gone, and the time left as far as earlier runs tell it."""
        count = sum(state in ("done", "valid") for state in self.states.values())
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(total=max(1, len(self.states)), completed=count, width=30), self._summary(count))
        return line

    def _summary(self, count: int) -> Text:
        text = f"{count} of {len(self.states)} phases, {duration(time.monotonic() - self.began)}"
        left = [self.expected[name] for name, state in self.states.items() if state == "waiting"]
        # no sum with a gap: half an estimate reads like a whole one
        if left and all(seconds is not None for seconds in left):
            text += f", about {duration(sum(seconds or 0 for seconds in left))} of work in what waits"
        return Text(text, style="dim")


def _output(running: RunningPhase) -> list[str]:
    """The lines of this attempt, without progress bars, which overwrite themselves."""
    # not as text, which would make a "\r" a new line
    lines = running.log.read_bytes().decode("utf-8", "replace").split("\n")
    begins = [number for number, line in enumerate(lines) if line.startswith("--- ")]
    return [line for line in lines[begins[-1] + 1 if begins else 0 :] if line.strip() and "\r" not in line]


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def make_display() -> PlainDisplay:
    """Live on a terminal, plain elsewhere."""
    console = Console(file=sys.stdout)
    # a log file or a batch system gets plain lines: cursor movements would fill it
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()
