"""The plan of a job on named hardware: memory, time and steps from what one rank was measured to do.

Times are lower bounds: every kernel at its published peak. The bound lets compute, memory and network overlap
perfectly, so no implementation of these kernels is faster; "serial" runs them one after another, as eager PyTorch with
blocking tensor-parallel collectives does. A real step takes longer than both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from data_tools.token_cache import context_bytes
from megatron_patches.planner.gpus import GIB, Gpu, is_inside_node, wire_bytes
from megatron_patches.planner.job import Job
from megatron_patches.planner.measure import Measurement
from megatron_patches.planner.meter import Costs

# Ours: CUDA context, NCCL's buffers and cuBLAS workspaces, and what the caching allocator loses to fragmentation.
RESERVED_BYTES, FRAGMENTATION = 2 * GIB, 0.05
# Of a training pass: two attention products forward against five backward, the least of all kernels; two more when
# recomputed.
FORWARD_SHARE, FORWARD_SHARE_RECOMPUTED = 2 / 7, 2 / 9
NAME_BYTES = 32  # of a context id and a query id together
SCORE_BYTES = 22  # a float32 as a JSON number, with its comma


@dataclass(frozen=True)
class Data:
    """The training set: the paper's is 211 queries with about 91,000 pairs."""

    num_contexts: int = 211
    num_pairs: int = 91_000


@dataclass(frozen=True)
class Times:
    """Seconds on each resource at its peak, and of the kernels one by one, each at the slower of its two rooflines."""

    compute: float
    memory: float
    network: float
    kernels: float

    @property
    def bound(self) -> float:
        """Nothing is faster than its slowest resource."""
        return max(self.compute, self.memory, self.network)

    @property
    def bound_by(self) -> str:
        """The resource that sets the bound."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))

    @property
    def serial(self) -> float:
        """Kernel after kernel, then the network."""
        return self.kernels + self.network


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

    @cached_property
    def costs(self) -> Costs:
        """One whole step: every micro-batch, the update, and the data-parallel traffic once."""
        return Costs.mix([(self.job.num_microbatches, self.measured.microbatch), (1.0, self.measured.update)])

    @cached_property
    def step(self) -> Times:
        """One whole step."""
        return self.times_of(self.costs)

    @cached_property
    def microbatch(self) -> Times:
        """Forward and backward of one micro-batch."""
        return self.times_of(self.measured.microbatch)

    def times_of(self, costs: Costs) -> Times:
        """All FLOPs at the peak of their type, all reads and writes of unfused kernels and all collectives at full
        bandwidth.
        """
        compute = memory = kernels = network = 0.0
        for kernel, count in costs.kernels.items():
            is_half = kernel.dtype in (torch.bfloat16, torch.float16)
            of_flops = kernel.flops / (self.gpu.bf16_flops if is_half else self.gpu.fp32_flops)
            of_bytes = kernel.moved_bytes / self.gpu.memory_bandwidth
            compute, memory, kernels = (
                compute + count * of_flops,
                memory + count * of_bytes,
                kernels + count * max(of_flops, of_bytes),
            )
        for message, count in costs.messages.items():
            is_near = is_inside_node(message.ranks, self.gpus_per_node)
            sent = wire_bytes(message.collective, message.message_bytes, len(message.ranks))
            network += count * sent / (self.gpu.link_bandwidth if is_near else self.gpu.network_bandwidth)
        return Times(compute, memory, network, kernels)

    @property
    def samples_per_epoch(self) -> int:
        """Contexts forwarded in one pass over all pairs, every context with the mean number of them; in the late
        layout over all lists.
        """
        if self.job.is_late:
            return self.data.num_contexts
        if self.recipe == "literal" or self.job.pairs_per_context == 1:
            return self.data.num_pairs
        return self.data.num_contexts * math.ceil(
            self.data.num_pairs / self.data.num_contexts / self.job.pairs_per_context
        )

    @property
    def num_steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(self.samples_per_epoch / self.job.global_batch_size)

    @property
    def pairs_per_step(self) -> int:
        """Preferences of one step; a list of the late layout counts each pair of its passages, which the teacher's
        margins order.
        """
        of_list = math.comb(self.job.documents, 2) if self.job.is_late else self.job.pairs_per_context
        return self.job.global_batch_size * (1 if self.recipe == "literal" else of_list)

    def reference_seconds(self, kind: str) -> float:
        """Scoring every context once with the frozen model, before the first step; neither the literal recipe nor a
        late job does.
        """
        if self.recipe == "literal" or self.job.is_late:
            return 0.0
        share = FORWARD_SHARE_RECOMPUTED if self.job.is_recomputed else FORWARD_SHARE
        per_context = share * getattr(self.microbatch, kind) / self.job.micro_batch_size
        return math.ceil(self.data.num_contexts / self.job.data_parallel) * per_context

    def hours(self, kind: str) -> float:
        """One epoch with its reference scores, in hours; ``kind`` is "bound" or "serial"."""
        return (self.num_steps * getattr(self.step, kind) + self.reference_seconds(kind)) / 3600

    @property
    def store_bytes(self) -> float:
        """The tokenised contexts on disk, one order of documents each: what every node must be able to read."""
        num_pairs = self.data.num_pairs / self.data.num_contexts
        return self.data.num_contexts * context_bytes(
            self.job.sequence_tokens, self.job.documents, num_pairs, NAME_BYTES
        )

    @property
    def reference_store_bytes(self) -> float:
        """The file of reference scores; the literal recipe keeps the model instead, a late job learns from labels."""
        return (
            0.0
            if self.recipe == "literal" or self.job.is_late
            else float(self.data.num_contexts * self.job.documents * SCORE_BYTES)
        )

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
            "global_batch_size": self.job.global_batch_size,
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
            "waits_per_step": costs.waits,
            "sent_bytes_per_step": self.traffic_by_collective(),
            "compute_seconds": self.step.compute,
            "memory_seconds": self.step.memory,
            "network_seconds": self.step.network,
            "bound_seconds": self.step.bound,
            "bound_by": self.step.bound_by,
            "serial_seconds": self.step.serial,
            "samples_per_epoch": self.samples_per_epoch,
            "pairs_per_step": self.pairs_per_step,
            "steps": self.num_steps,
            "reference_seconds": self.reference_seconds("bound"),
            "hours_at_least": self.hours("bound"),
            "hours_serial": self.hours("serial"),
            "store_bytes": self.store_bytes,
            "reference_store_bytes": self.reference_store_bytes,
        }
