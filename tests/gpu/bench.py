"""Where the acceptance list runs: eight GPUs with models of the true size, or two CPU processes with tiny ones."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
START = Callable[[Sequence[str], int, Path], int]  # flags of pretrain_headrank.py, ranks, log -> exit code


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    save: Path
    events: list[dict[str, Any]] = field(repr=False)

    @property
    def losses(self) -> list[float]:
        """L_total of every step."""
        return [event["total"] for event in self.events if event["event"] == "train"]

    @property
    def memory(self) -> dict[str, float]:
        """Bytes after the first step, the most of any rank."""
        last = next(event for event in self.events if event["event"] == "memory")
        return {name: value for name, value in last.items() if name not in ("event", "iteration")}

    @property
    def peak_bytes(self) -> float:
        """Of CUDA's allocator, or resident."""
        return self.memory.get("max_allocated", self.memory.get("max_resident", math.nan))

    @property
    def tokens(self) -> int:
        """Of the longest step on rank 0."""
        return max(event["tokens"] for event in self.events if event["event"] == "train")

    @property
    def step_seconds(self) -> float:
        """The median step without the first."""
        seconds = [event["seconds"] for event in self.events if event["event"] == "train"]
        return float(np.median(seconds[1:] or seconds))

    def references(self) -> dict[str, np.ndarray]:
        """The frozen model's scores by context."""
        lines = (self.save / "reference_scores.jsonl").read_text().splitlines()[1:]
        return {row["context_id"]: np.array(row["scores"]) for row in map(json.loads, lines)}


@dataclass(frozen=True)
class Bench:
    """One machine and the jobs that fit it. ``model`` and ``lists`` are of the smallest size, short lists, for
    comparing numbers.
    """

    place: Path
    start: START
    sizes: tuple[int, ...]  # tensor-parallel sizes, ascending, the first of them 1
    engines: tuple[str, ...]  # values of --transformer-impl
    model: Path
    heads: Path
    lists: Path
    has_gpu: bool
    steps: int = 4  # of a run, an even number

    def train(
        self, name: str, *flags: str, ranks: int, save: Path | None = None, iterations: int | None = None
    ) -> Trained:
        """A run of its own folder, or going on in ``save``."""
        save = save or self.place / name
        log = self.place / f"{name}.log"
        shared = {
            "--headrank-model": self.model,
            "--headrank-heads": self.heads,
            "--train-data-path": self.lists,
            "--save": save,
            "--train-iters": iterations or self.steps,
            "--lr": 1e-4,
            "--lr-decay-style": "constant",
            "--log-interval": 1,
            "--headrank-pairs-per-context": 4,
            "--global-batch-size": self.sizes[-1],  # every number of data-parallel ranks divides it
        }
        given = {word for word in flags if word.startswith("--")}
        words = [str(part) for flag, value in shared.items() if flag not in given for part in (flag, value)]
        code = self.start([*words, *flags], ranks, log)
        assert code == 0, f"{name}: exit code {code}\n{log.read_text(errors='replace')[-6000:]}"
        return trained(save)

    def split(self, size: int) -> tuple[str, ...]:
        """The flags of a tensor-parallel size, with as many ranks as the largest."""
        return ("--tensor-model-parallel-size", str(size))


def trained(save: Path) -> Trained:
    """A run by its folder."""
    return Trained(save, [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()])


def start_with_torchrun(flags: Sequence[str], ranks: int, log: Path) -> int:
    """As a user does."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "pretrain_headrank.py",
        *flags,
    ]
    return run(command, log, {})


def run(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
    """A command from the repository's root, its output in a file that begins with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": str(ROOT), **variables}
    with open(log, "ab") as output:
        output.write(f"{shlex.join(map(str, command))}\n".encode())
        output.flush()
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
