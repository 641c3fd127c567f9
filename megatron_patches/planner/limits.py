"""What breaks first when a job grows: longer contexts, larger models, more nodes; and the smallest tensor
parallelism that fits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_patches.planner.gpus import GIB, MIB
from megatron_patches.planner.job import Job
from megatron_patches.planner.measure import measure_by_depth
from megatron_patches.planner.plan import Plan
from megatron_patches.planner.shapes import KNOWN_MODELS, heads_of
from megatron_patches.shape import valid_tensor_parallel_sizes
from megatron_patches.training.assembly import count_parameters


@dataclass(frozen=True)
class Limit:
    """The first thing that breaks on one axis of growth; ``value`` is the last size that works (None: nothing
    breaks).
    """

    axis: str
    value: float | None
    reason: str


def replan(plan: Plan, job: Job) -> Plan:
    """The same plan of another job, measured by depth; a plan of the very same job is kept."""
    return plan if job == plan.job else dataclasses.replace(plan, job=job, measured=measure_by_depth(job, plan.recipe))


def least_lasting_bytes(job: Job, recipe: str) -> float:
    """Weights, gradients and optimizer state on paper: a size whose sum is too large already need not be built."""
    weights = count_parameters(job.shape, job.heads.l_max if recipe == "ours" else None)
    if recipe == "literal" and not job.shape.is_tied:
        weights -= job.shape.vocab * job.shape.hidden  # neither recipe builds an output layer
    shards = job.data_parallel if job.has_distributed_optimizer else 1
    bytes_each = (2 if job.is_bf16 else 4) * (1 if recipe == "ours" else 2) + 4 + (12 if job.is_bf16 else 8) / shards
    return weights * bytes_each / job.tensor_parallel


def is_known_to_fit(plan: Plan, job: Job) -> bool | None:
    """Whether the plan's job would fit at another tensor-parallel size, as far as that follows without building it.

    A tensor is either the same on all tensor-parallel ranks or cut among them, so from size T to a smaller t memory
    grows, but at most T / t times. None: not to be said without a measurement.
    """
    peak, usable = plan.measured.peak_bytes, plan.usable_bytes
    ratio = plan.job.tensor_parallel / job.tensor_parallel
    if max(1.0, ratio) * peak <= usable:
        return True
    if min(1.0, ratio) * peak > usable:
        return False
    if ratio >= 1 and least_lasting_bytes(job, plan.recipe) + plan.measured.activation_bytes > usable:
        return False
    return None


def smallest_tensor_parallel(plan: Plan, *, is_batch_free: bool = False) -> int | None:
    """The smallest size that fits the GPU; None when none does. From the largest down, and only sizes in doubt are
    built.
    """
    smallest, nearest = None, plan
    for job in reversed(plan.job.possible_sizes(is_batch_free=is_batch_free)):
        verdict = is_known_to_fit(nearest, job)
        if verdict is None:
            nearest = replan(plan, job)
            verdict = nearest.fits
        if not verdict:
            break
        smallest = job.tensor_parallel
    return smallest


def context_limit(plan: Plan) -> Limit:
    """Activations grow linearly with the sequence; the model's positions are the other wall."""
    job, peak = plan.job, plan.measured.peak_bytes
    longer = dataclasses.replace(job, documents=2 * job.documents)
    per_token = (measure_by_depth(longer, plan.recipe).peak_bytes - peak) / (
        longer.sequence_tokens - job.sequence_tokens
    )
    room = int(job.sequence_tokens + (plan.usable_bytes - peak) / per_token)
    positions = job.shape.max_positions
    if room < positions:
        advice = (
            "a larger tensor-parallel size"
            if job.is_recomputed
            else "--recompute-granularity full or a larger tensor-parallel size"
        )
        reason = (
            f"GPU memory: {per_token / MIB:.2f} MiB of activations a token; then {advice}, or --seq-length to "
            "shorten documents"
        )
        return Limit("tokens in a context", max(0, room), reason)
    return Limit(
        "tokens in a context", positions, f"the model's {positions:,} positions; memory would hold {room:,} tokens"
    )


def model_limit(plan: Plan) -> Limit:
    """The largest Qwen3 that fits this layout, and what is too large in the next one. The largest is tried first: it
    may fit.
    """
    names = [name for name, shape in KNOWN_MODELS.items() if shape.family == plan.job.shape.family]
    larger = [name for name in names if count_parameters(KNOWN_MODELS[name]) > count_parameters(plan.job.shape)]
    reason = "nothing breaks up to the largest model known here"
    for name in reversed(larger):
        shape = KNOWN_MODELS[name]
        if plan.job.tensor_parallel not in valid_tensor_parallel_sizes(shape):
            reason = f"{name} cannot be cut {plan.job.tensor_parallel} ways ({shape.groups} key-value groups)"
            continue
        grown = replan(plan, dataclasses.replace(plan.job, model=name, shape=shape, heads=heads_of(name, shape)))
        if grown.fits:
            return Limit(f"model (largest that fits: {name})", None, reason)
        reason = (
            f"{name} needs {grown.measured.peak_bytes / GIB:.0f} GiB of {grown.usable_bytes / GIB:.0f}, most of it "
            f"{_heaviest(grown)}"
        )
    return Limit(f"model (largest that fits: {plan.job.model if plan.fits else 'none'})", None, reason)


def _heaviest(plan: Plan) -> str:
    measured = plan.measured
    parts = {
        "activations": measured.activation_bytes,
        "optimizer state": measured.optimizer_bytes,
        "weights and gradients": measured.parameter_bytes + measured.gradient_bytes + measured.reference_bytes,
    }
    heaviest = max(parts, key=lambda part: parts[part])
    return f"{heaviest} ({parts[heaviest] / GIB:.0f} GiB)"


def node_limit(plan: Plan) -> Limit:
    """More nodes split the same global batch: either no micro-batch is left to give away, or the network takes over.

    With one global batch the work of a rank shrinks with the nodes, the gradients it must exchange do not.
    """
    job = plan.job
    most = max(1, job.global_batch_size // job.micro_batch_size * job.tensor_parallel // plan.gpus_per_node)
    exchanged = plan.measured.gradient_bytes + plan.measured.parameter_bytes
    exchange = exchanged / plan.gpu.network_bandwidth
    nodes_a_rank = job.tensor_parallel / plan.gpus_per_node
    crossover = job.global_batch_size / job.micro_batch_size * plan.microbatch.serial / exchange * nodes_a_rank
    if crossover < most:
        reason = (
            f"the exchange of {exchanged / GIB:.1f} GiB of gradients and weights a step ({exchange * 1000:.0f} ms "
            "between nodes) takes "
            "longer than the forward and backward passes left to a rank; a larger global batch moves it"
        )
        return Limit("nodes", max(1, int(crossover)), reason)
    reason = (
        f"the global batch of {job.global_batch_size} contexts: one micro-batch of {job.micro_batch_size} a rank is "
        "left"
    )
    return Limit("nodes", most, reason)


def first_limits(plan: Plan) -> list[Limit]:
    """One limit an axis."""
    return [context_limit(plan), model_limit(plan), node_limit(plan)]
