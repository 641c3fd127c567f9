"""Phases that run in the test's own process, so that their functions can be replaced; everything else of the runner
is real.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrank.errors import InputError
from headrank.experiments import runner
from headrank.experiments.phases import Call, Phase
from headrank.experiments.processes import RunningPhase, log_path


@dataclasses.dataclass
class Ended:
    """A process that has ended already."""

    returncode: int
    pid: int = -1

    def poll(self) -> int:
        return self.returncode


def run_calls_here(
    monkeypatch: pytest.MonkeyPatch, do: Callable[[Call], Any] = lambda call: call.function(*call.arguments)
) -> None:
    """Let the runner do calls at once; an InputError is exit code 2, as in the worker."""

    def start(phase: Phase, output: Path, jobs: int, lock: int, slot: int = 0) -> RunningPhase:
        log = log_path(output, phase)
        log.parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(phase.action, Call)
        try:
            do(phase.action)
            code, words = 0, ""
        except InputError as error:
            code, words = 2, str(error)
        log.write_text(f"--- now\n{words}\n")
        return RunningPhase(phase, Ended(code), log)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "start", start)
