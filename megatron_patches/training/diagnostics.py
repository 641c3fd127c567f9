"""What a first run on a new machine is asked about: memory after the first step, where the time goes, a profile of a
few steps.

Names, defaults and lines are Megatron's. Timers measure between two synchronisations, so their levels above 0 slow a
step down.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.timers import Timers
from megatron.core.utils import unwrap_model

from megatron_patches import device
from megatron_patches.parallel_scores import gather_from_all
from megatron_patches.training.assembly import data_parallel_rank
from megatron_patches.training.config import TrainingConfig

logger = logging.getLogger(__name__)

MEBIBYTE = 2**20
PROFILES = "torch_profile"  # Megatron's folder beside that of TensorBoard


def memory_in_use() -> dict[str, float]:
    """Bytes of this process: of CUDA's caching allocator, or resident on a CPU."""
    if device.has_cuda():
        return {
            "allocated": torch.cuda.memory_allocated(),
            "max allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "max reserved": torch.cuda.max_memory_reserved(),
        }
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = pages * resource.getpagesize()
    # the kernel brings its maximum up to date now and then
    return {"resident": resident, "max resident": max(resident, highest)}


def memory_line(rank: int, iteration: int, memory: dict[str, float]) -> str:
    """Megatron's line."""
    parts = "".join(f" | {name}: {value / MEBIBYTE:.2f}" for name, value in memory.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB){parts}"


def report_memory(iteration: int, metrics: Any) -> None:
    """A line for each rank that holds another part of the model, and the largest numbers in metrics.jsonl.
    Collective.
    """
    mine = (torch.distributed.get_rank(), data_parallel_rank(), memory_in_use())
    everyone = gather_from_all(mine)
    for rank, replica, memory in everyone:
        if replica == 0:
            logger.info("%s", memory_line(rank, iteration, memory))
    names = mine[2]
    metrics.write(
        "memory", iteration, {name.replace(" ", "_"): max(memory[name] for _, _, memory in everyone) for name in names}
    )


class StepWatch:
    """Timers and profiler of one run, told when a step begins and ends."""

    def __init__(self, config: TrainingConfig, model: torch.nn.Module, optimizer: Any) -> None:
        """Hand the timers to Megatron's own functions, which fill most of them."""
        self.config = config
        self.timers = Timers(config.timing_log_level, config.timing_log_option)
        unwrap_model(model).config.timers = self.timers
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.config.timers = self.timers
        self._profiler: Any = None
        self._nvtx: Any = None

    @contextlib.contextmanager
    def timed(self, name: str, level: int) -> Iterator[None]:
        """Time a block under Megatron's name for it."""
        timer = self.timers(name, log_level=level)
        timer.start()
        yield
        timer.stop()

    def log_times(self, steps: int) -> None:
        """Milliseconds a step since the last call, as --timing-log-option says. Collective."""
        if self.timers._timers:
            text = self.timers.get_all_timers_string(normalizer=float(steps))
            if text is not None:
                logger.info("%s", text)

    def before_step(self, iteration: int) -> None:
        """``iteration`` steps have been taken."""
        if self._is_profiled and iteration == self.config.profile_step_start:
            self._start_profile()

    def after_step(self, iteration: int) -> None:
        """``iteration`` steps have been taken."""
        if self._is_profiled and iteration == self.config.profile_step_end:
            self.stop_profile()

    @property
    def _is_profiled(self) -> bool:
        ranks = self.config.profile_ranks
        return self.config.profile and (not ranks or torch.distributed.get_rank() in ranks)

    def _start_profile(self) -> None:
        if self.config.use_pytorch_profiler:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if device.has_cuda() else []
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
            return
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=True)
        self._nvtx.__enter__()

    def stop_profile(self) -> None:
        """Write what was recorded; harmless when nothing is."""
        if self._profiler is not None:
            self._profiler.stop()
            folder = profile_folder(self.config)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{torch.distributed.get_rank()}.json.gz"
            self._profiler.export_chrome_trace(str(path))
            logger.info(
                "profile of steps %d to %d: %s", self.config.profile_step_start + 1, self.config.profile_step_end, path
            )
            self._profiler = None
        if self._nvtx is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            self._nvtx.__exit__(None, None, None)
            self._nvtx = None


def profile_folder(config: TrainingConfig) -> Path:
    """Where traces go: beside TensorBoard's folder, as Megatron has it, else below --save."""
    if config.tensorboard_dir:
        return Path(config.tensorboard_dir).parent / PROFILES
    assert config.save is not None, "checked with the flags"
    return Path(config.save) / PROFILES
