"""A world of any size in one process: a fake process group, Megatron's groups in it, and fake tensors for the devices.

Nothing is communicated and no number is computed; only shapes, types and the order of operations are real. One rank is
built. All ranks of a data-parallel group do the same, and tensor-parallel ranks differ only in how many core heads they
own, so the rank with the most of them stands for all.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from megatron.core.parallel_state import generate_masked_orthogonal_rank_groups as _generate_rank_groups
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from headrank.method import attention
from headrank.method.flexible_attention import FlexibleMask
from megatron_patches import device
from megatron_patches.planner.balanced_experts import balanced_experts
from megatron_patches.planner.meter import StepMeter
from megatron_patches.planner.tiled_attention import attend_to_tiles


@contextlib.contextmanager
def fake_world(
    world_size: int,
    tensor_model_parallel_size: int,
    rank: int = 0,
    *,
    expert_parallel: int = 1,
    has_gpu_kernels: bool = True,
    lacks: Sequence[str] = (),
) -> Iterator[StepMeter]:
    """Become rank ``rank`` of a fake world, with every operator metered. Leaves no process group behind.

    ``has_gpu_kernels`` takes the operators that a GPU would run where they differ from the CPU's in what they keep for
    backward: fused RMSNorm, Megatron's fused gated MLP, products of a few rows, FlexAttention. Without it the rehearsal
    is of a CPU job. Transformer Engine's layers keep the same tensors as Megatron's own: input and output of the norm,
    Q, K, V, context, log sums.
    """
    from megatron.core import parallel_state, tensor_parallel

    assert not torch.distributed.is_initialized(), "the planner needs a process of its own"
    with warnings.catch_warnings(), _quiet_megatron(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        device.install_cpu_backend()
        _start_fake_process_group(world_size, rank)
        stack.callback(device.shutdown)
        for patch in _substitutes(rank):
            stack.enter_context(patch)
        if has_gpu_kernels:
            stack.enter_context(mock.patch.object(device, "has_compiled_fusions", lambda: True))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(mock.patch.object(torch.nn.RMSNorm, "forward", _fused_norm))
            stack.enter_context(mock.patch.object(attention, "_lacks_grouped_kernel", _lacks_grouped_kernel))
            if "grouped rows" in lacks:
                stack.enter_context(mock.patch.object(attention, "_attend_few", _attend_few_by_the_masked_kernel))
            stack.enter_context(mock.patch.object(FlexibleMask, "attend", attend_to_tiles))
        stack.enter_context(_NumbersFromFakes())
        stack.enter_context(mock.patch.object(MoELayer, "forward", balanced_experts))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=1 if expert_parallel > 1 else None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(StepMeter())


def _start_fake_process_group(world_size: int, rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(backend="fake", rank=rank, world_size=world_size, store=FakeStore())


def _substitutes(rank: int) -> list[Any]:
    """What fakes cannot do: real gloo side groups, objects sent through tensors (every rank would send the same), casts
    in place.

    And what would take most of the time with a thousand ranks: registering the groups of the others, and listing all
    groups anew.
    """
    from megatron.core import parallel_state

    real_new_group = torch.distributed.new_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        return real_new_group(ranks, *args, **{**kwargs, "backend": "fake"})

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def unchanged(*_: Any, **__: Any) -> None:
        pass

    def bfloat16(module: torch.nn.Module) -> torch.nn.Module:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.dtype != torch.bfloat16:
                    part._parameters[name] = _converted(parameter)
        return module

    replacements = {
        "new_group": new_group,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": unchanged,
        "barrier": unchanged,
    }
    patches = [mock.patch.object(torch.distributed, name, function) for name, function in replacements.items()]
    patches.append(mock.patch.object(parallel_state, "generate_masked_orthogonal_rank_groups", _rank_groups))
    return [*patches, mock.patch.object(torch.nn.Module, "bfloat16", bfloat16)]


def _rank_groups(world_size: int, parallel_size: list[int], mask: list[bool]) -> list[list[int]]:
    """Megatron's own lists, made once: a plan asks for the same ones dozens of times."""
    return [list(ranks) for ranks in _known_rank_groups(world_size, tuple(parallel_size), tuple(mask))]


@lru_cache(maxsize=256)
def _known_rank_groups(world_size: int, parallel_size: tuple[int, ...], mask: tuple[bool, ...]) -> list[list[int]]:
    return _generate_rank_groups(world_size, list(parallel_size), list(mask))


def _converted(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A new bfloat16 parameter with the old one's marks: torch exchanges fake parameters in place, which their weak
    references forbid.
    """
    new = torch.nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def _fused_norm(norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm as one kernel, under the condition torch has for it on a GPU: input and weight of one type.

    On a CPU torch takes RMSNorm apart into float32 pieces. LayerNorm, one kernel on both, reads, writes and keeps the
    same.
    """
    if norm.weight is None or norm.weight.dtype != x.dtype:
        return torch.nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return torch.nn.functional.layer_norm(x, norm.normalized_shape, norm.weight)


def _lacks_grouped_kernel(query: torch.Tensor, *, has_mask: bool) -> bool:
    """headrank.method.attention's answer on a GPU."""
    return has_mask or query.dtype == torch.float32


def _attend_few_by_the_masked_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """What calibration rows would cost without the grouped product."""
    return attention._attend(query, key, value, attn_mask=mask, scale=scale)


class _NumbersFromFakes(TorchFunctionMode):
    """``torch.tensor`` of fake scalars (Megatron's gradient norm) would read memory that is not there; give it ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the fake entries of torch.tensor's list, pass everything else on."""
        if func is torch.tensor:
            args = (tree_map_only(FakeTensor, lambda _: 1.0, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quiet_megatron() -> Iterator[None]:
    """Megatron tells every rank's life at INFO level; a plan is one table."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
