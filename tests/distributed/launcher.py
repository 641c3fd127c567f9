"""Runs a function on real processes over gloo and brings back what each rank returned.

``run_ranks(function, 2, argument)`` starts two processes with torchrun's environment variables; each finds the function
by its module's name, so it must stand at the top level of a module under tests/. What it returns must survive
torch.save. A rank that fails, dies or hangs ends the others, and the error shows every rank's output.

Importing torch and Megatron costs ten seconds of CPU a process, so one process, the nursery, imports them once and
every rank is a fork of it. It runs no tensor code itself, so there are no threads or locks to inherit.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUIET_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # bf16 on virtual machines that advertise AMX may die with SIGILL
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
}
IMPORTED_ONCE = (
    "torch",
    "transformers",
    "headrank.reranking.reranker",
    "megatron_patches.checkpoints.export",
    "megatron_patches.parallel_scores",
)
_nursery: subprocess.Popen[str] | None = None


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds the output of all ranks."""


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **place}


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 540,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` processes; returns the ranks' results in order."""
    import torch

    with tempfile.TemporaryDirectory(prefix="headrank-ranks-") as folder:
        place = Path(folder)
        (place / "call.pickle").write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        job = {"place": folder, "world_size": world_size, "timeout": timeout, "environment": dict(environment or {})}
        codes = _ask_nursery(job)
        if any(codes):
            outputs = [f"--- rank {rank}, exit code {code}\n{_output(place, rank)}" for rank, code in enumerate(codes)]
            raise RankFailure(f"{function.__qualname__} on {world_size} ranks\n" + "\n".join(outputs))
        return [torch.load(place / f"result-{rank}.pt", weights_only=False) for rank in range(world_size)]


def _ask_nursery(job: Mapping[str, Any]) -> list[int]:
    """Hand over a job and wait for the exit codes (negative: the signal that ended a rank)."""
    global _nursery
    if _nursery is None or _nursery.poll() is not None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **QUIET_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "tests.distributed.launcher"]
        _nursery = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_nursery.stdin.close)
    _nursery.stdin.write(json.dumps(job) + "\n")
    _nursery.stdin.flush()
    answer = _nursery.stdout.readline()
    if not answer:
        raise RankFailure(f"the nursery died with exit code {_nursery.wait()}; its output is above")
    return json.loads(answer)


def _output(place: Path, rank: int) -> str:
    return (place / f"output-{rank}.txt").read_text(errors="replace")[-6000:]


def main() -> None:
    """The nursery: import once, then fork the ranks of one job after the other until the tests close the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints must not be taken for an answer
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        port = free_port()
        ranks = [_fork(job, rank, port) for rank in range(job["world_size"])]
        answers.write(json.dumps(_wait(ranks, time.monotonic() + job["timeout"])) + "\n")
        answers.flush()


def _fork(job: Mapping[str, Any], rank: int, port: int) -> int:
    nursery, place = os.getpid(), Path(job["place"])
    output = os.open(place / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    child = os.fork()
    if child:
        os.close(output)
        return child
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(rank_environment(rank, job["world_size"], port) | job["environment"])
        threading.Thread(target=_end_with, args=(nursery,), daemon=True).start()
        _run(place, rank)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into the nursery's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(place: Path, rank: int) -> None:
    import torch

    module, name, arguments = pickle.loads((place / "call.pickle").read_bytes())
    torch.save(getattr(importlib.import_module(module), name)(*arguments), place / f"result-{rank}.pt")


def _end_with(parent: int) -> None:
    """Leave when the nursery is gone: killed from outside it cannot end its ranks itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _wait(ranks: list[int], deadline: float) -> list[int]:
    """Exit codes once all are done; one that fails, the deadline, or the end of the tests' process ends the rest."""
    tests, codes = os.getppid(), dict.fromkeys(ranks, 0)
    running = set(ranks)
    while running:
        for child in list(running):
            finished, status = os.waitpid(child, os.WNOHANG)
            if finished:
                running.remove(child)
                codes[child] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline or os.getppid() != tests:
            time.sleep(1)  # others may be about to say the same
            for child in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            for child in running:
                codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
        time.sleep(0.02)
    return [codes[child] for child in ranks]


if __name__ == "__main__":
    main()
