"""The plan of a job on named hardware: memory, time and steps from what one rank was measured to do.

Times are lower bounds: every kernel at its published peak. ``bound_seconds`` lets compute, memory and network overlap
perfectly, so no implementation of these kernels is faster; ``serial_seconds`` runs them one after another, as eager PyTorch
with blocking tensor-parallel collectives does. A real step takes longer than both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.planner_gpus import GIB, Gpu, is_inside_node, wire_bytes
from megatron_patches.planner_job import Job
from megatron_patches.planner_measure import Measurement
from megatron_patches.planner_meter import Costs

# Ours: CUDA context, NCCL's buffers and cuBLAS workspaces, and what the caching allocator loses to fragmentation.
RESERVED_BYTES, FRAGMENTATION = 2 * GIB, 0.05


@dataclass(frozen=True)
class Data:
    """The training set: the paper's is 211 queries with about 91,000 pairs."""

    num_contexts: int = 211
    num_pairs: int = 91_000


@dataclass(frozen=True)
class Plan:
    """One recipe of one job on one kind of GPU."""

    job: Job
    recipe: str
    gpu: Gpu
    gpus_per_node: int
    data: Data
    measured: Measurement

    @property
    def usable_bytes(self) -> float:
        """Memory left for tensors."""
        return self.gpu.memory_bytes * (1 - FRAGMENTATION) - RESERVED_BYTES

    @property
    def fits(self) -> bool:
        """Whether the peak stays below what is usable."""
        return self.measured.peak_bytes <= self.usable_bytes

    @property
    def costs(self) -> Costs:
        """One whole step: every micro-batch, the update, and the data-parallel traffic once."""
        return Costs.mix([(self.job.num_microbatches, self.measured.microbatch), (1.0, self.measured.update)])

    @property
    def compute_seconds(self) -> float:
        """All FLOPs at the peak of their type."""
        return sum(count * kernel.flops / self._peak_flops(kernel.dtype) for kernel, count in self.costs.kernels.items())

    @property
    def memory_seconds(self) -> float:
        """All reads and writes of unfused kernels at full bandwidth."""
        return self.costs.traffic_bytes / self.gpu.memory_bandwidth

    @property
    def network_seconds(self) -> float:
        """All collectives at full bandwidth of the link they use."""
        return sum(
            count * wire_bytes(message.collective, message.message_bytes, len(message.ranks)) / self._bandwidth(message.ranks)
            for message, count in self.costs.messages.items()
        )

    @property
    def bound_seconds(self) -> float:
        """A step cannot be faster than its slowest resource."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def serial_seconds(self) -> float:
        """Kernel after kernel, each at the slower of its two rooflines, then the network."""
        kernels = sum(
            count * max(kernel.flops / self._peak_flops(kernel.dtype), kernel.moved_bytes / self.gpu.memory_bandwidth)
            for kernel, count in self.costs.kernels.items()
        )
        return kernels + self.network_seconds

    @property
    def bound_by(self) -> str:
        """The resource that sets the bound."""
        times = {"compute": self.compute_seconds, "memory": self.memory_seconds, "network": self.network_seconds}
        return max(times, key=lambda name: times[name])

    @property
    def samples_per_epoch(self) -> int:
        """Contexts forwarded in one pass over all pairs."""
        if self.recipe == "literal":
            return self.data.num_pairs
        return self.data.num_contexts * math.ceil(self.data.num_pairs / self.data.num_contexts / self.job.pairs_per_context)

    @property
    def num_steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(self.samples_per_epoch / self.job.global_batch_size)

    @property
    def reference_seconds(self) -> float:
        """Scoring every context once with the frozen model: about a third of a training pass. Nothing for the literal recipe."""
        if self.recipe == "literal":
            return 0.0
        per_context = self.serial_seconds / self.job.num_microbatches / 3
        return math.ceil(self.data.num_contexts / self.job.data_parallel) * per_context

    def hours(self, seconds_per_step: float) -> float:
        """One epoch with its reference scores, in hours."""
        return (self.num_steps * seconds_per_step + self.reference_seconds) / 3600

    def traffic_by_collective(self) -> dict[str, float]:
        """Bytes this rank sends in one step, by collective, group size and link."""
        totals: dict[str, float] = defaultdict(float)
        for message, count in self.costs.messages.items():
            sent = count * wire_bytes(message.collective, message.message_bytes, len(message.ranks))
            if sent:
                where = "in the node" if is_inside_node(message.ranks, self.gpus_per_node) else "between nodes"
                totals[f"{message.collective} over {len(message.ranks)} {where}"] += sent
        return dict(totals)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, per GPU."""
        measured, costs = self.measured, self.costs
        return {
            "recipe": self.recipe,
            "model": self.job.model,
            "gpu": self.gpu.name,
            "world_size": self.job.world_size,
            "tensor_parallel": self.job.tensor_parallel,
            "data_parallel": self.job.data_parallel,
            "layers": self.job.heads.l_max + 1 if self.recipe == "ours" else self.job.shape.layers,
            "sequence_tokens": self.job.sequence_tokens,
            "parameters": measured.num_parameters,
            "parameter_bytes": measured.parameter_bytes,
            "gradient_bytes": measured.gradient_bytes,
            "optimizer_bytes": measured.optimizer_bytes,
            "reference_bytes": measured.reference_bytes,
            "activation_bytes": measured.activation_bytes,
            "peak_bytes": measured.peak_bytes,
            "usable_bytes": round(self.usable_bytes),
            "fits": self.fits,
            "microbatches": self.job.num_microbatches,
            "flops_per_step": costs.flops,
            "memory_bytes_per_step": costs.traffic_bytes,
            "kernels_per_step": costs.num_kernels,
            "sent_bytes_per_step": self.traffic_by_collective(),
            "compute_seconds": self.compute_seconds,
            "memory_seconds": self.memory_seconds,
            "network_seconds": self.network_seconds,
            "bound_seconds": self.bound_seconds,
            "bound_by": self.bound_by,
            "serial_seconds": self.serial_seconds,
            "samples_per_epoch": self.samples_per_epoch,
            "pairs_per_step": self.job.global_batch_size * (1 if self.recipe == "literal" else self.job.pairs_per_context),
            "steps": self.num_steps,
            "reference_seconds": self.reference_seconds,
            "hours_at_least": self.hours(self.bound_seconds),
            "hours_serial": self.hours(self.serial_seconds),
        }

    def _peak_flops(self, dtype: torch.dtype) -> float:
        return self.gpu.bf16_flops if dtype in (torch.bfloat16, torch.float16) else self.gpu.fp32_flops

    def _bandwidth(self, ranks: tuple[int, ...]) -> float:
        return self.gpu.link_bandwidth if is_inside_node(ranks, self.gpus_per_node) else self.gpu.network_bandwidth
