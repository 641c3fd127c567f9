"""A phase of a study: what it makes, what it reads, what must be done before, and how it is done (a command or a
Python call).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrank.artifacts import Artifact
from headrank.errors import InputError

STAMPS = ".study"  # folder of stamps in a study's output; its name begins with a dot, so no fingerprint counts it


@dataclass(frozen=True)
class Command:
    """A process: what a person could type. ``environment`` is added to that of the runner."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    saves_when_signalled: bool = False  # a training: SIGUSR1 makes it write a checkpoint and end
    processes: int = 1

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Call:
    """A Python function and its arguments, which are pickled; it runs in a process of its own, so that its peak
    memory is its own.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Phase:
    """One step. ``name`` is a path such as train/seed-1: --only train chooses all below it.

    ``external`` are files that no phase makes; they must be there before anything begins.
    """

    name: str
    action: Command | Call
    artifacts: tuple[Artifact, ...]
    needs: tuple[str, ...] = ()
    external: tuple[Path, ...] = ()
    is_always_done: bool = False  # cheap, and what it reads is not listed
    prints: bool = False  # its output is for people, and shown when it ends
    remedy: str = ""  # where a file of ``external`` comes from

    @property
    def num_processes(self) -> int:
        """Of its command."""
        return self.action.processes if isinstance(self.action, Command) else 1

    def why_stale(self) -> str | None:
        """The first reason to do it (again); None where everything it makes is valid."""
        reasons = [reason for artifact in self.artifacts if (reason := artifact.why_stale()) is not None]
        return reasons[0] if reasons else "always done" if self.is_always_done else None

    def seconds_before(self) -> float | None:
        """What it took the last time, finished or not."""
        stamps = [stamp for artifact in self.artifacts if (stamp := artifact.stamp) is not None]
        return max((stamp.seconds for stamp in stamps), default=None)

    def seconds_expected(self) -> float | None:
        """What the whole phase took the last time; None where the last attempt was not finished."""
        stamps = [artifact.stamp for artifact in self.artifacts]
        # the seconds of an attempt that was stopped are no estimate of a whole one
        return (
            self.seconds_before()
            if stamps and all(stamp is not None and stamp.is_complete for stamp in stamps)
            else None
        )


def select_phases(phases: Sequence[Phase], only: Sequence[str]) -> list[Phase]:
    """The phases whose names are, or begin with, one of ``only``; all of them without it. An unknown name is an
    InputError.
    """
    if not only:
        return list(phases)
    for wanted in only:
        if not any(_is_below(phase.name, wanted) for phase in phases):
            groups = list(dict.fromkeys(phase.name.partition("/")[0] for phase in phases))
            raise InputError(
                f"`only` {wanted}: no such phase; there are {', '.join(groups)} ('headrank experiment show' lists all)"
            )
    # in the order of the plan and not of the flag: phases stand after what they need
    return [phase for phase in phases if any(_is_below(phase.name, wanted) for wanted in only)]


def _is_below(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted.rstrip('/')}/")


def check_plan(phases: Sequence[Phase]) -> None:
    """Names are unique, and every need is an earlier phase: the plan is a graph without cycles, in an order that can
    be done.
    """
    seen: set[str] = set()
    for phase in phases:
        assert phase.name not in seen, f"two phases are called {phase.name}"
        unknown = set(phase.needs) - seen
        assert not unknown, f"{phase.name} needs {unknown}, which does not come before it"
        seen.add(phase.name)


def require_inputs(chosen: Sequence[Phase], phases: Sequence[Phase]) -> None:
    """What the chosen phases read is there, or is made by a phase that is chosen too; checked before anything begins.

    A file may be compressed. What a phase that was not chosen made must be there; a stale one is used as it is.
    """
    names = {phase.name for phase in chosen}
    by_name = {phase.name: phase for phase in phases}
    for phase in chosen:
        for path in phase.external:
            if not path.exists() and not path.with_name(f"{path.name}.gz").exists():
                remedy = phase.remedy or f"a relative path is taken from {Path.cwd()}"
                raise InputError(f"{phase.name}: {path}: no such file; {remedy}")
            _refuse_own_output(phase, path, phases)
        for need in (by_name[name] for name in phase.needs if name not in names):
            if not all(artifact.exists for artifact in need.artifacts):
                raise InputError(
                    f"{phase.name} needs {need.name}, which is not done; choose it too: `only` {need.name} {phase.name}"
                )


def _refuse_own_output(phase: Phase, path: Path, phases: Sequence[Phase]) -> None:
    """What is read must not lie where the study writes: an artefact of other settings is removed before it is made
    again.
    """
    for other in phases:
        for artifact in other.artifacts:
            # a stale artefact is removed before it is made: reading from it would remove the input
            if path.resolve().is_relative_to(artifact.path.resolve()):
                raise InputError(
                    f"{phase.name} reads {path}, which {other.name} would replace; choose another output for the study"
                )
