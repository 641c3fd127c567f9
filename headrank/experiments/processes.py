"""The processes of phases: started with their log, asked to save and stop, and one runner at a time per study."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrank.errors import InputError
from headrank.experiments import machine
from headrank.experiments.phases import Call, Command, Phase

# What makes a process a member of a group. LOCAL_RANK stays: it says which GPU the process has.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
SECONDS_BETWEEN_SIGNALS = 2.0  # a training that is still loading ignores the first one


@dataclass
class RunningPhase:
    """A phase at work, in a session of its own: Ctrl-C reaches the runner alone, which tells each phase in its own
    way.
    """

    phase: Phase
    process: subprocess.Popen[bytes]
    log: Path
    slot: int = 0
    started: float = field(default_factory=time.monotonic)
    _signalled: float = 0.0

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started

    def ask_to_stop(self, times: int) -> None:
        """First a signal that lets it save, repeated while it is still loading; asked again SIGTERM, then SIGKILL."""
        saves = isinstance(self.phase.action, Command) and self.phase.action.saves_when_signalled
        number = signal.SIGKILL if times > 2 else signal.SIGTERM if times > 1 or not saves else signal.SIGUSR1
        if time.monotonic() - self._signalled >= SECONDS_BETWEEN_SIGNALS or number != signal.SIGUSR1:
            self._signalled = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                # the whole group: torchrun's ranks are its children, and a signal to torchrun alone would leave them
                os.killpg(self.process.pid, number)

    def last_line(self) -> str:
        """The last words of its log: where a training or a progress bar stands."""
        with contextlib.suppress(OSError), open(self.log, "rb") as stream:
            # the end only: it is asked for eight times a second, and logs grow to megabytes
            stream.seek(max(0, os.path.getsize(self.log) - 4096))
            lines = stream.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


def start(phase: Phase, output: Path, jobs: int, lock: int, slot: int = 0) -> RunningPhase:
    """Start a phase; the one in slot N sees the N-th GPU alone, if it is one process.

    It inherits the lock: as long as it lives, even without its runner, nobody else begins the study again.

    SIGUSR1 is ignored from the start, which a process inherits, so that it kills neither torchrun nor a training that
    is loading; the training takes it over once it can save.
    """
    log = log_path(output, phase)
    log.parent.mkdir(parents=True, exist_ok=True)
    action = phase.action
    processes = phase.num_processes
    # a study started inside a torchrun job would otherwise make its phases wait for ranks that do not exist
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    gpus = machine.gpus() if jobs > 1 and processes == 1 else []
    its_gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
    environment = {
        **inherited,
        **machine.environment(jobs, processes),
        **its_gpu,
        **(action.environment if isinstance(action, Command) else {}),
    }
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    words = action.words if isinstance(action, Command) else (sys.executable, "-m", "headrank.experiments.worker")
    with open(log, "ab") as stream:
        stream.write(f"--- {datetime.datetime.now():%Y-%m-%d %H:%M:%S} {action}\n".encode())
        stream.flush()
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN) if _is_main_thread() else None
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if isinstance(action, Call) else subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C reaches the runner alone, which passes it on: a terminal would send it to every process at
                # once, and no training could save
                start_new_session=True,
                # the lock belongs to the open file: it is held until the last process that has it ends
                pass_fds=(lock,),
            )
        finally:
            if before is not None:
                signal.signal(signal.SIGUSR1, before)
    if isinstance(action, Call) and process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pickle.dump(action, pipe)
    return RunningPhase(phase, process, log, slot)


def _is_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def log_path(output: Path, phase: Phase) -> Path:
    """Where the words of a phase go."""
    return output / "logs" / f"{phase.name.replace('/', '.')}.txt"


@contextlib.contextmanager
def only_runner(path: Path) -> Iterator[int]:
    """Hold a lock file and yield its descriptor; work that somebody else is doing is an InputError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # the lock is on the open file and not on its being there: a killed runner leaves the file and no lock
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode("ascii", "replace").strip()
            raise InputError(
                f"{path.parent.parent}: process {holder}, or a phase that it started, is at work here; wait for it, "
                "or end it first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield descriptor
    finally:
        os.close(descriptor)  # a phase that still runs keeps the lock


def holder_of_lock(path: Path) -> str | None:
    """The process that works on a study now; None where nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 100).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    return None
