"""What breaks first when a job grows: longer contexts, larger models, more nodes; and the smallest tensor parallelism that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_patches.assembly import count_parameters
from megatron_patches.planner import Plan
from megatron_patches.planner_gpus import GIB
from megatron_patches.planner_job import Job
from megatron_patches.planner_measure import measure_by_depth
from megatron_patches.planner_shapes import KNOWN_MODELS, heads_of
from megatron_patches.shape import valid_tensor_parallel_sizes


@dataclass(frozen=True)
class Limit:
    """The first thing that breaks on one axis of growth; ``value`` is the last size that works (None: nothing breaks)."""

    axis: str
    value: float | None
    reason: str


def replan(plan: Plan, **changes: object) -> Plan:
    """The same plan for a changed job, measured by depth."""
    job = dataclasses.replace(plan.job, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, job=job, measured=measure_by_depth(job, plan.recipe))


def smallest_tensor_parallel(plan: Plan) -> tuple[int | None, list[Plan]]:
    """The smallest size that fits the GPU, and the plans of all sizes tried, ascending; None when none does."""
    tried: list[Plan] = []
    for size in valid_tensor_parallel_sizes(plan.job.shape):
        is_possible = plan.job.world_size % size == 0
        per_step = plan.job.micro_batch_size * (plan.job.world_size // size) if is_possible else 0
        if not is_possible or per_step == 0 or plan.job.global_batch_size % per_step:
            continue
        tried.append(replan(plan, tensor_parallel=size))
        if tried[-1].fits:
            return size, tried
    return None, tried


def context_limit(plan: Plan) -> Limit:
    """Activations grow linearly with the sequence; the model's positions are the other wall."""
    longer = replan(plan, documents=2 * plan.job.documents)
    shorter = replan(plan, documents=plan.job.documents)
    per_token = (longer.measured.peak_bytes - shorter.measured.peak_bytes) / (longer.job.sequence_tokens - shorter.job.sequence_tokens)
    room = int(plan.job.sequence_tokens + (plan.usable_bytes - shorter.measured.peak_bytes) / per_token)
    positions = plan.job.shape.max_positions
    if room < positions:
        advice = (
            "--recompute-activations or a larger tensor-parallel size" if not plan.job.is_recomputed else "a larger tensor-parallel size"
        )
        reason = f"GPU memory: {per_token / 2**20:.2f} MiB of activations a token; then {advice}, or --seq-length to shorten documents"
        return Limit("tokens in a context", max(0, room), reason)
    reason = f"the model's {positions} positions; memory would hold {room} tokens"
    return Limit("tokens in a context", positions, reason)


def model_limit(plan: Plan) -> Limit:
    """The largest Qwen3 that fits this layout, and what is too large in the next one."""
    names = [name for name, shape in KNOWN_MODELS.items() if shape.family == "qwen3"]
    larger = [name for name in names if count_parameters(KNOWN_MODELS[name]) > count_parameters(plan.job.shape)]
    largest = plan.job.model if plan.fits else None
    for name in larger:
        shape = KNOWN_MODELS[name]
        if plan.job.tensor_parallel not in valid_tensor_parallel_sizes(shape):
            return Limit("model", None, f"{name} cannot be cut {plan.job.tensor_parallel} ways ({shape.groups} key-value groups)")
        grown = replan(plan, model=name, shape=shape, heads=heads_of(name, shape))
        if not grown.fits:
            measured = grown.measured
            parts = {
                "activations": measured.activation_bytes,
                "optimizer state": measured.optimizer_bytes,
                "weights and gradients": measured.parameter_bytes + measured.gradient_bytes + measured.reference_bytes,
            }
            heaviest = max(parts, key=lambda part: parts[part])
            reason = (
                f"{name} needs {measured.peak_bytes / GIB:.0f} GiB of {grown.usable_bytes / GIB:.0f}, "
                f"most of it {heaviest} ({parts[heaviest] / GIB:.0f} GiB)"
            )
            return Limit(f"model (largest that fits: {largest or 'none'})", None, reason)
        largest = name
    return Limit(f"model (largest tried: {largest or plan.job.model})", None, "nothing breaks up to the largest model known here")


def node_limit(plan: Plan) -> Limit:
    """More nodes split the same global batch: either no micro-batch is left to give away, or the network takes over.

    With one global batch the work of a rank shrinks with the nodes, the gradients it must exchange do not.
    """
    job = plan.job
    most = max(1, job.global_batch_size // job.micro_batch_size * job.tensor_parallel // plan.gpus_per_node)
    per_micro = plan.serial_seconds / job.num_microbatches
    exchanged = plan.measured.gradient_bytes + plan.measured.parameter_bytes
    exchange = exchanged / plan.gpu.network_bandwidth
    crossover = job.global_batch_size * per_micro / exchange * job.tensor_parallel / plan.gpus_per_node / job.micro_batch_size
    if 1 < crossover < most:
        reason = (
            f"the exchange of {exchanged / GIB:.1f} GiB of gradients and weights a step ({exchange * 1000:.0f} ms between nodes) takes "
            "longer than the forward and backward passes left to a rank; a larger global batch moves it"
        )
        return Limit("nodes", int(crossover), reason)
    reason = f"the global batch of {job.global_batch_size} contexts: one micro-batch of {job.micro_batch_size} a rank is left"
    return Limit("nodes", most, reason)


def first_limits(plan: Plan) -> list[Limit]:
    """One limit an axis."""
    return [context_limit(plan), model_limit(plan), node_limit(plan)]


def tensor_parallel_table(plan: Plan, sizes: list[int] | None = None) -> list[Plan]:
    """The plan at every tensor-parallel size that the model and the batch allow, measured by depth."""
    plans = []
    for size in sizes or valid_tensor_parallel_sizes(plan.job.shape):
        job: Job = plan.job
        per_step = job.micro_batch_size * (job.world_size // size) if job.world_size % size == 0 else 0
        if per_step and job.global_batch_size % per_step == 0:
            plans.append(replan(plan, tensor_parallel=size))
    return plans
