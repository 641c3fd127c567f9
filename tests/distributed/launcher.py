"""Runs a function on real processes over gloo and brings back what each rank returned.

``run_ranks(function, 2, argument)`` starts two interpreters with torchrun's environment variables; each imports the function
by its module's name, so it must stand at the top level of a module under tests/. What it returns must survive torch.save. A
rank that fails, dies or hangs ends the others, and the error shows every rank's output.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
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


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds the output of all ranks."""


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment torchrun would give a rank, with this checkout importable and threads kept quiet."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **QUIET_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` processes; returns the ranks' results in order."""
    with tempfile.TemporaryDirectory(prefix="headrank-ranks-") as folder:
        place = Path(folder)
        (place / "call.pickle").write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        port = free_port()
        ranks = [_start(place, rank, world_size, port, environment or {}) for rank in range(world_size)]
        try:
            _wait(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        codes = [process.returncode for process in ranks]
        if any(codes):
            outputs = [f"--- rank {rank}, exit code {code}\n{_output(place, rank)}" for rank, code in enumerate(codes)]
            raise RankFailure(f"{function.__qualname__} on {world_size} ranks\n" + "\n".join(outputs))
        import torch

        return [torch.load(place / f"result-{rank}.pt", weights_only=False) for rank in range(world_size)]


def _start(place: Path, rank: int, world_size: int, port: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(place / f"output-{rank}.txt", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.launcher", str(place)],
            cwd=ROOT,
            env={**rank_environment(rank, world_size, port), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all are done, or one has failed, or time is up (killed ranks then count as failed)."""
    while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _output(place: Path, rank: int) -> str:
    return (place / f"output-{rank}.txt").read_text(errors="replace")[-6000:]


def main() -> None:
    """The inside of a rank: import the function, call it, store what it returned."""
    place = Path(sys.argv[1])
    module, name, arguments = pickle.loads((place / "call.pickle").read_bytes())
    import importlib

    import torch

    result = getattr(importlib.import_module(module), name)(*arguments)
    torch.save(result, place / f"result-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
