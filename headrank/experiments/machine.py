"""What a study asks of the machine: cores, free memory, and threads per process when several run at a time."""

from __future__ import annotations

import os
from pathlib import Path

from headrank.files import atomic_write

GIGABYTES_FOR_TWO_RANKS = 12  # about 5 GB per data-parallel rank of the embedded model, and some air
# Waiting threads that spin make every process on a small machine several times slower.
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_gigabytes() -> float:
    """Memory that is available now; 16 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 16.0
    # MemAvailable and not MemFree: the page cache gives way
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) / (1 << 20) if found else 16.0


def choose_processes(memory: Path, tensor_parallel: int) -> int:
    """Two data-parallel ranks where cores and memory allow it, else one.

    A choice that was written to ``memory`` is kept: free memory changes from minute to minute, and the same training on
    another number of ranks would be another training.
    """
    if memory.is_file():
        text = memory.read_text(encoding="ascii").strip()
        if text.isdecimal():
            return int(text)
    allows_two = num_cores() >= 2 * tensor_parallel and free_gigabytes() >= GIGABYTES_FOR_TWO_RANKS
    return 2 * tensor_parallel if allows_two else tensor_parallel


def remember_processes(memory: Path, processes: int) -> None:
    """Keep a choice of ``choose_processes``."""
    if not memory.is_file():
        with atomic_write(memory) as stream:
            stream.write(f"{processes}\n")


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Nothing of CUDA is loaded to find out."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def environment(jobs: int, processes: int) -> dict[str, str]:
    """Variables of one of ``jobs`` phases that run at a time, each of ``processes`` processes; what the user set
    stays.
    """
    threads = max(1, num_cores() // (jobs * processes))
    wanted = {**QUIET_THREADS, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}
