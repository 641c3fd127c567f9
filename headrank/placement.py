"""Where a model runs and in which numbers, when the user does not say: the method's one question about GPUs."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from headrank.errors import InputError

_log = logging.getLogger(__name__)
_PROBE_SECONDS = 10
_HALF_PRECISION = (8, 0)  # compute capability from which on a GPU has bfloat16 and torch's flash kernel
ATTENTION, ATTENTION_VARIABLE = ("auto", "flash", "efficient", "cudnn", "math"), "HEADRANK_ATTENTION"


def resolve_device(
    device: str | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """The device (CUDA where there is one) and the number format (float32 on a CPU, else bfloat16).

    Processes that torchrun started on one machine get a GPU each, in turn; ``cuda:1`` is that one for all of them.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"`device` {device!r} is not a device; give cpu, cuda, cuda:1 or mps") from None
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if (chosen.index or 0) >= count:
            raise InputError(
                f"`device` {chosen}: this machine (or this build of torch) has {count} CUDA devices; give another "
                "or cpu"
            )
        chosen = (
            chosen if chosen.index is not None else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % count)
        )
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("`device` mps: this machine (or this build of torch) has none; give cpu")
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise InputError(f"`dtype` {dtype!r} is not a number format; give auto, float32, bfloat16, float16 or int8")
    return chosen, named or (torch.float32 if chosen.type == "cpu" else torch.bfloat16)


def fastest_float(device: torch.device, default: torch.dtype, *, is_large: bool = True) -> tuple[torch.dtype, str]:
    """The float format that this device is fastest in, and why, in words; a model that is not large stays in
    ``default`` on a CPU.
    """
    if device.type == "cpu":
        instructions = fast_bfloat16() if is_large else None
        return (torch.bfloat16, instructions) if instructions else (default, "")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _HALF_PRECISION:
        return torch.float32, "this GPU has no bfloat16"
    return default, ""


def describe(device: torch.device, numbers: str, reason: str = "", dtype: torch.dtype = torch.float32) -> str:
    """One line for the log: number format and why, device, and its threads or its attention kernel. Sets both."""
    how = {
        "cpu": lambda: f", {use_available_cores()} threads",
        "cuda": lambda: f", {choose_attention(device, dtype)} attention",
    }
    return f"{numbers} on {device}{f' ({reason})' if reason else ''}{how.get(device.type, str)()}"


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """Which of torch's kernels attends without a mask on a CUDA device: flash where the GPU and the number format have
    it, else the memory-efficient one, which always takes masks. HEADRANK_ATTENTION names another, for the whole
    process.
    """
    asked = os.environ.get(ATTENTION_VARIABLE, "auto")
    if asked not in ATTENTION:
        raise InputError(
            f"{ATTENTION_VARIABLE} {asked!r} in the environment is no attention kernel; give {', '.join(ATTENTION)}"
        )
    has_flash = dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(device) >= _HALF_PRECISION
    if asked == "auto":  # torch takes the same by itself, and other models of this process keep what they were given
        return "flash" if has_flash else "efficient"
    if asked == "flash" and not has_flash:
        raise InputError(
            f"{ATTENTION_VARIABLE} flash: needs bfloat16 or float16 and compute capability 8; give efficient or auto"
        )
    torch.backends.cuda.enable_flash_sdp(asked == "flash")
    torch.backends.cuda.enable_cudnn_sdp(asked == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(asked != "math")
    return asked


@functools.cache
def fast_bfloat16() -> str | None:
    """The instructions that make bfloat16 the faster format on this processor, or None where float32 is.

    Some virtual machines advertise instructions that kill the process: they are tried in a child first.
    """
    has_tiles, has_vectors = (
        getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    if not (has_tiles or has_vectors):
        return None
    if not _survives(lambda: torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)):
        _log.warning("bfloat16 products die on this machine although the processor advertises them; using float32")
        return None
    return "AMX" if has_tiles else "AVX512-BF16"


def _survives(work: Callable[[], object]) -> bool:
    """Whether ``work`` runs to its end in a forked child; without fork (Windows) the question is not asked and the
    answer is no.
    """
    if not hasattr(os, "fork"):
        return False
    child = os.fork()
    if child == 0:  # nothing but the work: no clean-up, no handlers of ours, and a deadline of its own
        for number in (signal.SIGALRM, signal.SIGILL):  # faulthandler would print a traceback that alarms the user
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_PROBE_SECONDS)
        # the parent's OpenMP threads do not exist in a forked child; waiting for them would hang
        torch.set_num_threads(1)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def available_cores() -> int:
    """Cores this process may use: affinity, cut by a container's CPU quota, which torch does not look at."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def use_threads(count: int) -> None:
    """What --threads says, before or after torch was imported; it wins over everything else."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def use_available_cores() -> int:
    """torch's threads where neither OMP_NUM_THREADS nor the caller chose: never more than the container gives.
    Returns their number.
    """
    if "OMP_NUM_THREADS" not in os.environ and available_cores() < torch.get_num_threads():
        torch.set_num_threads(available_cores())
    return torch.get_num_threads()
