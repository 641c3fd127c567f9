"""Do the phases of a plan: in order of their needs, several at a time, skipping what is valid; stop so that nothing is
lost.

A study that was stopped, killed or has failed goes on where it was when it is started again: what is complete and was
made from the same inputs is skipped, what is half-done is continued by its own command.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from headrank.artifacts import Artifact
from headrank.experiments import machine
from headrank.experiments.phases import STAMPS, Phase, check_plan, require_inputs
from headrank.experiments.processes import RunningPhase, only_runner, start

SECONDS_BETWEEN_LOOKS = 0.1
EXIT_STOPPED = 3  # saved before its end; start it again to go on
WAITING, RUNNING, VALID, DONE, FAILED, BLOCKED, STOPPED = (
    "waiting",
    "running",
    "valid",
    "done",
    "failed",
    "blocked",
    "stopped",
)
SETTLED = {VALID, DONE}


class Display(Protocol):
    """What is told to the person who watches."""

    def begin(self, phases: Sequence[Phase], states: dict[str, str]) -> None:
        """The phases that were chosen; ``states`` changes as they go."""

    def started(self, running: RunningPhase, reason: str) -> None:
        """A phase began, and why."""

    def skipped(self, phase: Phase) -> None:
        """A phase was done before and is still valid."""

    def ended(self, running: RunningPhase, state: str) -> None:
        """A phase is done, failed or was stopped."""

    def tick(self, running: Sequence[RunningPhase]) -> None:
        """Some time went by."""

    def stopping(self, times: int) -> None:
        """Somebody asked to stop, for the n-th time."""

    def end(self) -> None:
        """Nothing more happens."""


class Runner:
    """One run over a plan. ``jobs`` phases are at work at a time."""

    def __init__(
        self, phases: Sequence[Phase], output: Path, display: Display, *, jobs: int = 1, lock: Path | None = None
    ) -> None:
        """Take all phases of the study; those to do are named in ``run``. ``lock`` is another lock than the study's
        own.
        """
        check_plan(phases)
        self.phases, self.output, self.display, self.jobs = list(phases), output, display, jobs
        self.lock = lock or output / STAMPS / "study.lock"
        self.states: dict[str, str] = {}
        self._running: list[RunningPhase] = []
        self._stops = 0
        self._failures: list[int] = []
        self._begun: dict[str, list[Artifact]] = {}  # phase -> what it makes (again)

    def run(self, chosen: Sequence[Phase], first: Callable[[], None] = lambda: None) -> int:
        """Do the chosen phases, and ``first`` before them; 0 all done, 3 stopped and saved, 2 a phase has bad input,
        1 a phase failed.
        """
        require_inputs(chosen, self.phases)
        self.states = {phase.name: WAITING for phase in chosen}
        with only_runner(self.lock) as lock, self._told_of_signals():
            # under the lock: what it remembers is read by the phases of this run alone
            first()
            self.display.begin(chosen, self.states)
            try:
                self._loop(list(chosen), lock)
            finally:
                for running in self._running:  # an error of our own: end what was started
                    running.ask_to_stop(2)
                self.display.end()
        if self._failures:
            return 2 if set(self._failures) == {2} else 1
        return EXIT_STOPPED if any(state not in SETTLED for state in self.states.values()) else 0

    def _loop(self, waiting: list[Phase], lock: int) -> None:
        while self._running or (waiting and not self._stops):
            if not self._stops:
                waiting = self._start_ready(waiting, lock)
            else:
                for running in self._running:
                    if self._stops == 1:
                        running.ask_to_stop(1)
            for running in [running for running in self._running if running.process.poll() is not None]:
                self._running.remove(running)
                self._settle(running)
            self.display.tick(self._running)
            if self._running:
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _start_ready(self, waiting: list[Phase], lock: int) -> list[Phase]:
        """Start or skip what is ready, in the plan's order; returns what still waits."""
        left = []
        for phase in waiting:
            needs = [self.states[name] for name in phase.needs if name in self.states]
            if any(state in (FAILED, BLOCKED, STOPPED) for state in needs):
                self.states[phase.name] = BLOCKED
            elif any(state not in SETTLED for state in needs) or not self._has_room(phase) or self._stops:
                left.append(phase)
            # asked when its turn comes and not before: an earlier phase may just have made, or changed, what it reads
            elif (reason := phase.why_stale()) is None:
                self.states[phase.name] = VALID
                self.display.skipped(phase)
            else:
                # a phase of several artefacts makes the stale ones again; those that are valid keep their stamps
                self._begun[phase.name] = [artifact for artifact in phase.artifacts if artifact.why_stale() is not None]
                for artifact in self._begun[phase.name]:
                    artifact.begin()
                self.states[phase.name] = RUNNING
                slot = min(set(range(self.jobs)) - {running.slot for running in self._running})
                self._running.append(start(phase, self.output, self.jobs, lock, slot))
                self.display.started(self._running[-1], reason)
        return left

    def _has_room(self, phase: Phase) -> bool:
        """``jobs`` phases at a time; where there are GPUs, one of several processes takes them all and is alone."""
        if (
            machine.gpus()
            and self._running
            and any(each.num_processes > 1 for each in (phase, *(one.phase for one in self._running)))
        ):
            return False
        return len(self._running) < self.jobs

    def _settle(self, running: RunningPhase) -> None:
        """A process ended: its artefacts are complete, or kept to be continued."""
        code, phase = running.process.returncode, running.phase
        # exit code 0 alone is not enough: a process may end well without having written its file
        is_complete = code == 0 and all(artifact.exists for artifact in phase.artifacts)
        for artifact in self._begun.pop(phase.name):
            artifact.end(running.seconds, is_complete=is_complete)
        if is_complete:
            state = DONE
        elif self._stops or code == 0:  # a training that saved early ends with 0 and without its mark of completion
            state = STOPPED
        else:
            state = FAILED
            self._failures.append(code)
        self.states[phase.name] = state
        self.display.ended(running, state)

    @contextlib.contextmanager
    def _told_of_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask to stop; a second one is less patient, a third one kills."""

        def remember(number: int, frame: FrameType | None) -> None:
            self._stops += 1
            for running in self._running:
                running.ask_to_stop(self._stops)
            self.display.stopping(self._stops)

        # Python lets only the main thread handle signals; a runner in a test or a notebook's thread goes without
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
