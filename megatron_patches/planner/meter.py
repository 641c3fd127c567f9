"""What a step costs, read off the operators it really runs: live memory, FLOPs, HBM traffic, collectives.

One dispatch mode above ``FakeTensorMode`` sees every operator, forward, backward and optimizer alike, and every
collective with its process group. It works on real tensors too. Causal attention is counted at its true cost, the lower
triangle.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

# collective -> (printed name, position of the tensors whose bytes are the message, position of the process group)
COLLECTIVES: Mapping[str, tuple[str, int, int]] = {
    "c10d.allreduce_": ("all-reduce", 0, 1),
    "c10d.broadcast_": ("broadcast", 0, 1),
    "c10d.reduce_": ("reduce", 0, 1),
    "c10d.allgather_": ("all-gather", 0, 2),
    "c10d._allgather_base_": ("all-gather", 0, 2),
    "c10d.alltoall_base_": ("all-to-all", 1, 2),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "c10d.reduce_scatter_": ("reduce-scatter", 1, 2),
    "c10d.allgather_into_tensor_coalesced_": ("all-gather", 0, 2),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 2),
}
# torch has no fake version of these; they return nothing but a handle to wait on
_WITHOUT_FAKE = {"c10d.allgather_into_tensor_coalesced_", "c10d.reduce_scatter_tensor_coalesced_"}
# operators that read as much as they write, however large the table they read from
_SPARSE_READS = {aten.embedding, aten.gather, aten.index, aten.index_select, aten.slice, aten.select}
# what makes the host wait until the GPU has caught up
_WAITS = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.equal, aten.masked_select, aten._unique2}
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
    aten.detach,
    aten.alias,
}


class Kernel(NamedTuple):
    """What one launch costs: FLOPs in a type, and bytes read plus written."""

    flops: int
    dtype: torch.dtype
    moved_bytes: int


class Message(NamedTuple):
    """One collective: its name, the global ranks of its group, and the bytes of the whole tensor."""

    collective: str
    ranks: tuple[int, ...]
    message_bytes: int


@dataclass
class Costs:
    """How often each kernel and each message occurs on one rank. Counts may be fractions after ``mix``."""

    kernels: dict[Kernel, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[Message, float] = field(default_factory=lambda: defaultdict(float))
    waits: float = 0.0  # times that the host waits for the GPU

    @property
    def flops(self) -> float:
        """FLOPs of all types."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def traffic_bytes(self) -> float:
        """Bytes read and written by all kernels, nothing fused."""
        return sum(kernel.moved_bytes * count for kernel, count in self.kernels.items())

    @property
    def num_kernels(self) -> float:
        """Kernel launches."""
        return sum(self.kernels.values())

    @classmethod
    def mix(cls, parts: Sequence[tuple[float, Costs]]) -> Costs:
        """A weighted sum; weights may be negative."""
        result = cls()
        for weight, costs in parts:
            for kernel, count in costs.kernels.items():
                result.kernels[kernel] += weight * count
            for message, count in costs.messages.items():
                result.messages[message] += weight * count
            result.waits += weight * costs.waits
        return result


class StepMeter(TorchDispatchMode):
    """Counts everything dispatched while it is active; ``phase`` says to which account it goes.

    ``live_bytes`` is what the tensors made under the meter hold now, ``peak_bytes`` the most since the phase began. A
    fake number that Python asks for (``.item()``) is answered with 1, a fake truth value with False, and a fake mask
    selects half.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Costs] = defaultdict(Costs)
        self.phase = "build"
        self.live_bytes = self.peak_bytes = 0
        self.growth: dict[str, int] = {}  # phase -> peak above what was live when it began
        self._start_bytes = 0
        self._storages = WeakIdKeyDictionary()

    def enter(self, phase: str) -> None:
        """End the current phase, noting how far memory rose in it, and start another with a fresh peak."""
        self.growth[self.phase] = max(self.growth.get(self.phase, 0), self.peak_bytes - self._start_bytes)
        self.phase, self._start_bytes, self.peak_bytes = phase, self.live_bytes, self.live_bytes

    def announce(self, batch: Any) -> Iterator[Any]:
        """A data iterator of one micro-batch that starts its phase when it is taken."""
        self.enter("microbatch")
        yield batch

    def bytes_of(self, tensors: Any) -> int:
        """Bytes of the distinct storages behind these tensors."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(tensors)}
        return sum(storages.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator one level down and book it."""
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is torch.ops.prim.device:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if packet in _WAITS or (packet is aten.index and any(map(_is_mask, args[1]))):
            self.phases[self.phase].waits += 1
        if packet is aten._local_scalar_dense and isinstance(args[0], FakeTensor):
            return _any_number(args[0].dtype)
        if packet is aten.index:
            args = (args[0], [_half_of(index) for index in args[1]], *args[2:])
        result = FakeWork().boxed() if str(packet) in _WITHOUT_FAKE else func(*args, **kwargs)
        self._book(func, packet, args, kwargs, result)
        for tensor in _tensors(result):
            self._track(tensor)
        return result

    def _book(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        costs = self.phases[self.phase]
        name = str(packet)
        if name.startswith("c10d."):
            self._book_collective(costs, name, args)
            return
        if packet in _FREE or func.is_view:
            return
        formula = FLOP_FORMULAS.get(packet)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        moved = _moved_bytes(packet, args, kwargs, result)
        first = next(_tensors(args), None)
        costs.kernels[Kernel(flops, torch.float32 if first is None else first.dtype, moved)] += 1

    def _book_collective(self, costs: Costs, name: str, args: tuple[Any, ...]) -> None:
        if name == "c10d.barrier":
            return
        if name not in COLLECTIVES:
            raise NotImplementedError(f"the planner does not know the size of {name}")
        printed, tensors, group = COLLECTIVES[name]
        ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(args[group]))
        size = sum(item.numel() * item.element_size() for item in _tensors(args[tensors]))
        costs.messages[Message(printed, tuple(ranks), size)] += 1

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        size = storage.nbytes()
        self._storages[storage] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live_bytes -= size


def _any_number(dtype: torch.dtype) -> float | int | bool:
    """A stand-in for a number nobody computed: finite, not zero, and nothing to worry about."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _half_of(index: Any) -> Any:
    """A fake mask has no values to count; what HeadRank masks is the middle zone, half of the list."""
    if isinstance(index, FakeTensor) and _is_mask(index):
        return index.new_zeros(max(1, index.numel() // 2), dtype=torch.int64)
    return index


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, which are at most lists in tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """What a kernel touches of a tensor; an expanded one is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _moved_bytes(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes read plus bytes written by one kernel that fuses nothing."""
    written = sum(map(_tensor_bytes, _tensors(result)))
    if packet in _SPARSE_READS:
        return 2 * written
    return written + sum(map(_tensor_bytes, _tensors((args, *kwargs.values()))))


def _attention_pairs(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> int:
    """Query-key pairs over batch and heads that attention needs: the lower triangle when it is causal."""
    rows, columns = query.shape[-2], key.shape[-2]
    pairs = rows * (rows + 1) // 2 if is_causal and rows == columns else rows * columns
    return query.shape[0] * query.shape[1] * pairs


def _attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> int:
    """QK^T and PV."""
    return 2 * _attention_pairs(query, key, is_causal) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """QK^T again, dV, dP, dQ, dK: five products where the forward has two."""
    return 2 * _attention_pairs(query, key, is_causal) * (3 * query.shape[-1] + 2 * value.shape[-1])


FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    **{packet: flop_registry[packet] for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)},
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
