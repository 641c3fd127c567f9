"""One job, rehearsed: the real model, loss, DDP and optimizer run one step on fake tensors, and the meter is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrank.method.heads import Head, HeadSet
from headrank.method.readout import Readout
from megatron_patches.model import HeadRankModel
from megatron_patches.planner.job import Job
from megatron_patches.planner.late_recipe import late_batch
from megatron_patches.planner.meter import Costs, StepMeter
from megatron_patches.planner.recipes import RECIPES, build_full_model, literal_step, one_pass_batch, two_pass_batch
from megatron_patches.planner.world import fake_world
from megatron_patches.training.assembly import build_optimizer, build_policy, wrap_model
from megatron_patches.training.train_step import train_step

SHALLOW, DEEP = 1, 2  # l_max of the two small models of measure_by_depth


@dataclass(frozen=True)
class Measurement:
    """What one rank needs: bytes that stay, bytes that come and go, and the costs of a micro-batch and of the
    update.
    """

    num_parameters: int  # on this rank
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    reference_bytes: int
    activation_bytes: int  # peak of forward and backward above what stays
    microbatch: Costs
    update: Costs

    @property
    def lasting_bytes(self) -> int:
        """What stays in memory from step to step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.reference_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is ever needed: the update comes when activations are gone and needs less than they did."""
        return self.lasting_bytes + self.activation_bytes

    @classmethod
    def mix(cls, parts: Sequence[tuple[float, Measurement]]) -> Measurement:
        """A weighted sum of measurements, bytes rounded."""
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            weighted = [(weight, getattr(part, entry.name)) for weight, part in parts]
            is_costs = isinstance(weighted[0][1], Costs)
            values[entry.name] = (
                Costs.mix(weighted) if is_costs else round(sum(weight * value for weight, value in weighted))
            )
        return cls(**values)


@lru_cache(maxsize=256)
def measure(job: Job, recipe: str = "ours") -> Measurement:
    """Build the job on its fullest rank and run one step of one micro-batch; nothing is allocated."""
    assert recipe in RECIPES, recipe
    config = job.config()
    with fake_world(
        job.world_size,
        job.tensor_parallel,
        job.fullest_rank,
        expert_parallel=job.expert_parallel,
        has_gpu_kernels=job.has_gpu_kernels,
        lacks=job.lacks,
    ) as meter:
        policy = build_policy(config, job.shape, job.heads) if recipe == "ours" else build_full_model(config, job.shape)
        before_reference = meter.live_bytes
        reference = build_full_model(config, job.shape).requires_grad_(False) if recipe == "literal" else None
        reference_bytes = meter.live_bytes - before_reference
        model = wrap_model(config, policy)
        optimizer, _ = build_optimizer(config, model)
        _switch_phase_at_finalisation(policy, meter)
        meter.phase = "update"
        if reference is None:
            train_step(
                model,
                optimizer,
                meter.announce(late_batch(job) if job.is_late else one_pass_batch(job)),
                job.heads,
                config.loss,
                1,
            )
        else:
            literal_step(model, reference, optimizer, meter.announce(two_pass_batch(job)), job.heads, config)
        return _read(meter, policy, reference_bytes)


def measure_by_depth(job: Job, recipe: str = "ours") -> Measurement:
    """The same from models of a few layers, extended to the job's depth: all layers below l_max are alike, and so are
    all above.

    Parameters, FLOPs and messages are exact. The core heads' rows are all read in the last layers of the small models,
    which moves activations and memory traffic by a percent in a model of nine layers and less in deeper ones.
    """

    job.config()  # contradictions are refused here as they are by training

    def shallow(last_read: int, layers: int) -> Measurement:
        squeezed = _squeezed(job.heads, last_read)
        readout = None if job.heads.readout is None else Readout(weights=(1.0,) * len(squeezed))
        heads = dataclasses.replace(job.heads, heads=squeezed, num_layers=layers, readout=readout)
        # the global batch says how often a micro-batch runs, not what it costs: one value for all lets the cache answer
        batch = job.micro_batch_size * job.data_parallel
        shape = dataclasses.replace(job.shape, layers=layers)
        return measure(dataclasses.replace(job, heads=heads, shape=shape, global_batch_size=batch), recipe)

    if job.heads.l_max <= DEEP + 1:
        return measure(job, recipe)
    small, large = shallow(SHALLOW, SHALLOW + 1), shallow(DEEP, DEEP + 1)
    steps = (job.heads.l_max - SHALLOW) / (DEEP - SHALLOW)
    parts = [(1 - steps, small), (steps, large)]
    if recipe == "literal":
        unread = (job.shape.layers - 1 - job.heads.l_max) / (DEEP - SHALLOW)
        parts += [(-unread, small), (unread, shallow(SHALLOW, DEEP + 1))]
    return Measurement.mix(parts)


def _squeezed(heads: HeadSet, layer: int) -> tuple[Head, ...]:
    """The heads' numbers, all in one layer; the same number twice moves down a layer."""
    taken: list[Head] = []
    for _, head in heads.heads:
        place = next((row for row in range(layer, -1, -1) if (row, head) not in taken), None)
        if place is not None:
            taken.append((place, head))
    return tuple(taken)


def _read(meter: StepMeter, policy: HeadRankModel, reference_bytes: int) -> Measurement:
    parameters = list(policy.parameters())
    parameter_bytes = meter.bytes_of([parameter.data for parameter in parameters])
    gradient_bytes = meter.bytes_of(
        [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    )
    optimizer_bytes = meter.live_bytes - parameter_bytes - gradient_bytes - reference_bytes
    return Measurement(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        reference_bytes=reference_bytes,
        activation_bytes=meter.growth["microbatch"],
        microbatch=meter.phases["microbatch"],
        update=meter.phases["update"],
    )


def _switch_phase_at_finalisation(policy: HeadRankModel, meter: StepMeter) -> None:
    """Everything from Megatron's gradient finalisation on happens once per step, not once per micro-batch."""
    finalise = policy.config.finalize_model_grads_func

    def finalise_and_switch(*args: Any, **kwargs: Any) -> None:
        meter.enter("update")
        finalise(*args, **kwargs)

    policy.config.finalize_model_grads_func = finalise_and_switch
