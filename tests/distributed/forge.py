"""Starts training runs cheaply: one process imports everything once, every rank of every run is a fork of it.

A run is exactly ``torchrun --nproc-per-node RANKS pretrain_headrank.py ARGV`` without the seconds of importing torch
and Megatron. The forge is a process of its own (the tests' process may hold threads, a forge holds none) that reads
jobs as JSON lines and answers with exit codes. A job may ask to be killed: after some lines of metrics.jsonl and a
delay, every rank at once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT, free_port

# seconds; a run here takes two or three when the machine is idle
LIMIT = float(os.environ.get("HEADRANK_RUN_LIMIT", "240"))


@dataclass(frozen=True)
class Kill:
    """When to send ``number`` to every rank: once ``file`` has ``lines`` more lines than at the start, ``delay``
    seconds later.
    """

    file: str
    lines: int
    delay: float
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank (negative: the signal that ended it) and everything the ranks said."""

    codes: tuple[int, ...]
    said: str


class Forge:
    """The parent's side; use as a context manager."""

    def __enter__(self) -> Forge:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **QUIET_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.forge"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def run(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        ranks: int = 1,
        kill: Kill | None = None,
        module: str = "pretrain_headrank",
        largest_file: int | None = None,
    ) -> Outcome:
        """Run ``module``.main(argv) on some ranks and wait for all. ``largest_file`` bytes: writing more fails, as
        on a full disk.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        job = {
            "argv": list(argv),
            "log": str(log),
            "ranks": ranks,
            "kill": None if kill is None else vars(kill),
            "module": module,
        }
        job["largest_file"] = largest_file
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()
        assert reply, "the forge died; its stderr says why"
        return Outcome(tuple(json.loads(reply)), log.read_text(encoding="utf-8"))


def serve() -> None:
    """The forge's loop: import, then fork for every job."""

    for line in sys.stdin:
        codes = _run(json.loads(line))
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def _run(job: dict[str, Any]) -> list[int]:
    port = free_port()
    open(job["log"], "w").close()
    before = _lines(job["kill"]["file"]) if job["kill"] else 0
    children = [_fork(job, rank, port) for rank in range(job["ranks"])]
    codes: dict[int, int] = {}
    deadline, when = time.monotonic() + LIMIT, None
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (waited := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(waited[1])
        kill = job["kill"]
        if kill and when is None and _lines(kill["file"]) - before >= kill["lines"]:
            when = time.monotonic() + kill["delay"]
        is_late = time.monotonic() > deadline
        if is_late or (when is not None and time.monotonic() >= when):
            _signal([child for child in children if child not in codes], signal.SIGKILL if is_late else kill["number"])
            when = float("inf")
        time.sleep(0.005)
    return [codes[child] for child in children]


def _lines(file: str) -> int:
    try:
        return Path(file).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _signal(children: Sequence[int], number: int) -> None:
    for child in children:
        os.kill(child, number)


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job["ranks"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if job["largest_file"] is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that write() fails instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], job["largest_file"]))
        import importlib
        import traceback

        try:
            code = importlib.import_module(job["module"]).main(job["argv"])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever it was, the test reads it in the log
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


if __name__ == "__main__":
    serve()
