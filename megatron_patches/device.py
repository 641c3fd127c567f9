"""The only module that knows whether CUDA exists: process groups, seeds, and the CPU backend of Megatron-Core.

With CUDA nothing is shimmed: nccl, one GPU per process. Without it the real megatron-core runs over gloo behind a small
set of stand-ins for ``torch.cuda``. They are installed by an explicit call (``initialize`` or ``install_cpu_backend``),
never at import, and only on a machine without CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from headrank.errors import InputError

_cpu_mode: _CpuForCuda | None = None
# and what holds without torchrun
_LAUNCHER_NUMBERS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
_NEWEST_GENERATION = 10  # of which Megatron asks for nothing in the environment
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def has_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Where this process keeps its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def has_compiled_fusions() -> bool:
    """Whether Megatron's torch.compile'd fusions pay: on a GPU they do, on a CPU they only start a C++ compiler."""
    return has_cuda()


def initialize(
    tensor_model_parallel_size: int = 1,
    *,
    expert_model_parallel_size: int = 1,
    seed: int = 1234,
    timeout_minutes: float = 30,
) -> None:
    """Join (or start, alone) the process group and set up Megatron's groups and seeds.

    RANK, WORLD_SIZE and LOCAL_RANK come from torchrun; without them this is a world of one. What is left of the world
    after tensor parallelism is data parallelism; experts are given out over ``expert_model_parallel_size`` ranks of all
    of them. Calling it twice with the same sizes does nothing.
    """
    from megatron.core import parallel_state, tensor_parallel

    rank, world_size, local_rank = world_from_environment()
    if world_size % tensor_model_parallel_size:
        raise InputError(
            f"--tensor-model-parallel-size {tensor_model_parallel_size} does not divide the {world_size} "
            "process(es) of this run; "
            f"start a multiple of {tensor_model_parallel_size} with torchrun --nproc-per-node"
        )
    install_cpu_backend()
    if has_cuda():
        _require_a_gpu_each(local_rank)
        torch.cuda.set_device(local_rank)
    if not torch.distributed.is_initialized():
        is_launched = all(os.environ.get(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        # alone no port is opened: two single runs on one machine must not meet on torchrun's default
        rendezvous: dict[str, Any] = {} if is_launched else {"store": torch.distributed.HashStore()}
        torch.distributed.init_process_group(
            backend="nccl" if has_cuda() else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            **rendezvous,
        )
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if sizes == (tensor_model_parallel_size, expert_model_parallel_size):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=1,  # an expert is small: it is never cut
        distributed_timeout_minutes=math.ceil(timeout_minutes),
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def world_from_environment() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them, or a world of one; a set that is broken or half there
    is refused.
    """
    remedy = "start the program with torchrun, or unset torchrun's variables"
    numbers = {name: os.environ.get(name, default) for name, default in _LAUNCHER_NUMBERS.items()}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise InputError(f"{name} {text!r} in the environment is not a number; {remedy}")
    rank, world_size, local_rank, _ = map(int, numbers.values())
    if rank >= world_size:
        raise InputError(f"RANK {rank} in the environment does not fit into WORLD_SIZE {world_size}; {remedy}")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:
        raise InputError(f"WORLD_SIZE {world_size} in the environment without {', '.join(missing)}; {remedy}")
    return rank, world_size, local_rank


def _require_a_gpu_each(local_rank: int) -> None:
    """All processes of a machine refuse together when it has fewer GPUs than they are."""
    processes, gpus = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1), torch.cuda.device_count()
    if processes > gpus:
        raise InputError(
            f"{processes} processes on this machine, but {gpus} GPU(s); give torchrun --nproc-per-node {gpus} "
            f"(NPROC={gpus})"
        )


def keep_freed_memory() -> None:
    """Let the allocator keep what a step frees for the next one, as the CUDA allocator does.

    glibc returns large blocks to the system and every step faults them in again, page by page. Does nothing with CUDA
    or without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not has_cuda() and mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, -1)


def is_first_rank() -> bool:
    """Whether this process is the one that talks to people and writes shared files."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def shutdown() -> None:
    """Leave Megatron's groups and the process group; harmless when there are none."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def process_group_cleanup() -> Iterator[None]:
    """Leave the groups when the work is done.

    After an error only a process that is alone does: NCCL leaves together, and the others may wait in another
    collective. Their launcher ends them once this process has said what is wrong and exited.
    """
    try:
        yield
    except BaseException:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
            shutdown()
        raise
    shutdown()


def install_cpu_backend() -> None:
    """Let Megatron-Core run where there is no CUDA. Idempotent; does nothing where CUDA exists."""
    global _cpu_mode
    if has_cuda() or _cpu_mode is not None:
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.manual_seed(seed)
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, _nothing())
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _nothing())
    cuda.Stream, cuda.stream = _NoStream, contextlib.nullcontext
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    from megatron.core.tensor_parallel import random as megatron_random

    # These two reach into torch._C or keep their own reference, so the functions above do not cover them.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(megatron_random.__name__).addFilter(_is_not_the_shared_generator_warning)
    _cpu_mode = _CpuForCuda()
    _cpu_mode.__enter__()


def prepare_experts() -> None:
    """Let Megatron's exchange of tokens between experts run where there is no CUDA.

    Its split sizes become numbers on the way from a GPU to the host; on a CPU they are there already, as tensors, which
    gloo refuses.
    """
    if has_cuda():
        return
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def _as_numbers(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return values.numpy() if as_numpy and torch.is_tensor(values) else values


@contextlib.contextmanager
def trainer_without_cuda() -> Iterator[None]:
    """Let Megatron-LM's trainer start where there is no CUDA. Four of its functions cannot run there and are passed
    over:

    the assertion that there is CUDA, the question for the GPU's generation, compiling its dataset index (ours is
    another), and warming up compiled fusions.
    """
    if has_cuda():
        yield
        return
    from megatron.training import arguments, initialize, training

    with contextlib.ExitStack() as stack:
        for place in (training, initialize):
            whole = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
            if hasattr(place, "initialize_megatron"):
                stack.enter_context(mock.patch.object(place, "initialize_megatron", whole))
            if hasattr(place, "set_jit_fusion_options"):
                stack.enter_context(mock.patch.object(place, "set_jit_fusion_options", _nothing()))
        stack.enter_context(mock.patch.object(initialize, "_compile_dependencies", _nothing()))
        stack.enter_context(mock.patch.object(arguments, "get_device_arch_version", lambda: _NEWEST_GENERATION))
        yield


def _nothing() -> Callable[..., None]:
    """A CUDA call that means nothing on a CPU; a new function each time, because dynamo's tables refuse the same one
    twice.
    """
    return lambda *_, **__: None


def _is_not_the_shared_generator_warning(record: logging.LogRecord) -> bool:
    """Here the "CUDA" generator is the CPU's, so "CPU RNG state changed within GPU RNG context" is no news."""
    return "CPU RNG state changed" not in record.getMessage()


class _NoStream:
    """A stream that is always done: gloo and CPU kernels are in program order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what torch.cuda.Stream does."""

    wait_stream = wait_event = synchronize = _nothing()

    def record_event(self, *_: Any) -> _NoStream:
        """An event that has happened."""
        return self


class _CpuForCuda(TorchFunctionMode):
    """Rewrites what names CUDA explicitly: device arguments, ``.cuda()``, and the type names the optimizer compares."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    """Whether a device argument asks for CUDA: "cuda", "cuda:0" or a torch.device; a bare index counts too."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")
