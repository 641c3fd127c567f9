"""One job, rehearsed: the real model, loss, DDP and optimizer run one step on fake tensors, and the meter is read.

Two recipes. "ours" is what pretrain_headrank.py runs: layers up to l_max, both branches in one pass, P pairs a context, the
reference from its cache. "literal" is the paper's text: every layer, one pair a forward, calibration as a second pass, the frozen
reference as a second model in memory. Shapes: B batch, S sequence, N documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from data_tools.training_set import Sample
from headrank.attention import BranchLayout, batch_contexts
from headrank.heads import Head, HeadSet
from headrank.spans import EncodedContext
from megatron_patches import device
from megatron_patches.arguments import parse_arguments
from megatron_patches.assembly import build_optimizer, build_policy, wrap_model
from megatron_patches.attention import LayerRows
from megatron_patches.batches import Batch
from megatron_patches.config import TrainingConfig, config_from
from megatron_patches.model import CapturedRows, HeadRankModel, build_model, build_transformer_config
from megatron_patches.parallel_scores import core_head_scores
from megatron_patches.planner_meter import Costs, StepMeter
from megatron_patches.planner_world import fake_world
from megatron_patches.shape import ModelShape
from megatron_patches.train_step import batch_loss, guarded_update, train_step

SHALLOW, DEEP = 1, 2  # l_max of the two small models of measure_by_depth
RECIPES = ("ours", "literal")
# Prompt text around the documents, in Qwen3 tokens, measured on the training collections: chat opening, "[i] " and line
# breaks of each document, instruction + query + chat suffix, instruction + "N/A" + chat suffix, and the rows of I_q in both.
OPENING_TOKENS, LABEL_TOKENS, QUERY_TOKENS, CALIBRATION_TOKENS, QUERY_ROWS, CALIBRATION_ROWS = 4, 4, 36, 28, 10, 2


@dataclass(frozen=True)
class Job:
    """A training job as its launcher would start it."""

    model: str
    shape: ModelShape
    heads: HeadSet = field(hash=False)  # its settings are dictionaries; equality still compares it
    tensor_parallel: int = 1
    world_size: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 32
    documents: int = 100
    document_tokens: int = 80
    pairs_per_context: int = 16
    is_bf16: bool = True
    is_recomputed: bool = False
    has_distributed_optimizer: bool = True
    has_gpu_kernels: bool = True

    @property
    def prefix_tokens(self) -> int:
        """Tokens both branches share."""
        return OPENING_TOKENS + self.documents * (self.document_tokens + LABEL_TOKENS)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one context with both branches."""
        return self.prefix_tokens + QUERY_TOKENS + CALIBRATION_TOKENS

    @property
    def data_parallel(self) -> int:
        """Ranks that see different contexts."""
        return self.world_size // self.tensor_parallel

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def arguments(self) -> list[str]:
        """The flags of pretrain_headrank.py that shape the job."""
        flags = {
            "--tensor-model-parallel-size": self.tensor_parallel,
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.global_batch_size,
            "--headrank-pairs-per-context": self.pairs_per_context,
            "--headrank-model": self.model,
            "--headrank-heads": "heads.json",
            "--train-data-path": "data",
            "--train-iters": 1,
            "--lr": 1e-5,
            "--clip-grad": 5.0,
        }
        switches = {
            "--bf16": self.is_bf16,
            "--use-distributed-optimizer": self.has_distributed_optimizer,
            "--recompute-activations": self.is_recomputed,
        }
        return [str(part) for flag in flags.items() for part in flag] + [switch for switch, is_on in switches.items() if is_on]

    def config(self) -> TrainingConfig:
        """The job through the real parser and its checks."""
        return config_from(parse_arguments(self.arguments()), self.world_size)

    @property
    def fullest_rank(self) -> int:
        """The tensor-parallel rank that owns the most core heads."""
        per_rank = self.shape.heads // self.tensor_parallel
        owned = np.bincount([head // per_rank for _, head in self.heads.heads], minlength=self.tensor_parallel)
        return int(owned.argmax())


@dataclass(frozen=True)
class Measurement:
    """What one rank needs: bytes that stay, bytes that come and go, and the costs of a micro-batch and of the update."""

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
            values[entry.name] = Costs.mix(weighted) if is_costs else round(sum(weight * value for weight, value in weighted))
        return cls(**values)


@lru_cache(maxsize=256)
def measure(job: Job, recipe: str = "ours") -> Measurement:
    """Build the job on its fullest rank and run one step of one micro-batch; nothing is allocated."""
    assert recipe in RECIPES, recipe
    config = job.config()
    with fake_world(job.world_size, job.tensor_parallel, job.fullest_rank, has_gpu_kernels=job.has_gpu_kernels) as meter:
        policy = build_policy(config, job.shape, job.heads) if recipe == "ours" else _full_model(config, job.shape)
        before_reference = meter.live_bytes
        reference = _full_model(config, job.shape).requires_grad_(False) if recipe == "literal" else None
        reference_bytes = meter.live_bytes - before_reference
        model = wrap_model(config, policy)
        optimizer, _ = build_optimizer(config, model)
        _switch_phase_at_finalisation(policy, meter)
        if recipe == "ours":
            batches = _phased([_one_pass_batch(job)], meter)
            step = partial(train_step, model, optimizer, batches, job.heads, config.loss, 1)
        else:
            batches = _phased([_two_pass_batch(job)], meter)
            step = partial(_literal_step, model, reference, optimizer, batches, job.heads, config)
        meter.phase = "update"
        step()
        return _read(meter, policy, reference_bytes)


def measure_by_depth(job: Job, recipe: str = "ours") -> Measurement:
    """The same from models of a few layers, extended to the job's depth: all layers below l_max are alike, and so are all above.

    Exact but for where the core heads' rows are read (all in the last layer read), which costs next to nothing.
    """

    def shallow(last_read: int, layers: int) -> Measurement:
        heads = dataclasses.replace(job.heads, heads=_squeezed(job.heads, last_read), num_layers=layers)
        return measure(dataclasses.replace(job, shape=dataclasses.replace(job.shape, layers=layers), heads=heads), recipe)

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
    gradient_bytes = meter.bytes_of([parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")])
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
    """Everything from Megatron's gradient finalisation on happens once a step, not once a micro-batch."""
    finalise = policy.config.finalize_model_grads_func

    def finalise_and_switch(*args: Any, **kwargs: Any) -> None:
        meter.enter("update")
        finalise(*args, **kwargs)

    policy.config.finalize_model_grads_func = finalise_and_switch


def _phased(batches: list[Any], meter: StepMeter) -> Iterator[Any]:
    for batch in batches:
        meter.enter("microbatch")
        yield batch


def _full_model(config: TrainingConfig, shape: ModelShape) -> HeadRankModel:
    """Every layer, every weight trainable: the paper trains and optimises the whole model."""
    transformer_config = build_transformer_config(
        shape,
        tensor_model_parallel_size=config.tensor_parallel,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        recompute=config.recompute,
    )
    return build_model(shape, transformer_config=transformer_config)


def _encoded(job: Job, query_tokens: int, calibration_tokens: int, rows: int) -> EncodedContext:
    """A context of the job's lengths; the ids do not matter."""
    prefix, start = job.prefix_tokens, OPENING_TOKENS + LABEL_TOKENS
    width = job.document_tokens + LABEL_TOKENS
    first_row = prefix + query_tokens - rows
    end = prefix + query_tokens + calibration_tokens
    return EncodedContext(
        input_ids=np.zeros(end, np.int32),
        prefix_length=prefix,
        query_length=query_tokens,
        calibration_length=calibration_tokens,
        query_rows=(first_row, first_row + rows),
        calibration_rows=(end - min(calibration_tokens, CALIBRATION_ROWS), end),
        document_spans=tuple((start + width * index, start + width * index + job.document_tokens) for index in range(job.documents)),
    )


def _batch(job: Job, encoded: EncodedContext, num_pairs: int) -> Batch:
    pairs = np.stack([np.arange(num_pairs) % job.documents, np.arange(1, num_pairs + 1) % job.documents], axis=1)
    ranks = np.arange(1, job.documents + 1)
    sample = Sample("context", "query", 0, 0, encoded, ranks, np.zeros(job.documents, np.int64), pairs)
    input_ids_BS, layout = batch_contexts([encoded] * job.micro_batch_size, device=device.device())
    copies = range(job.micro_batch_size)
    return Batch(
        samples=(sample,) * job.micro_batch_size,
        input_ids_BS=input_ids_BS,
        layout=layout,
        ranks=tuple(torch.from_numpy(ranks) for _ in copies),
        pairs=tuple(torch.from_numpy(pairs) for _ in copies),
        references=tuple(torch.zeros(job.documents) for _ in copies),
    )


def _one_pass_batch(job: Job) -> Batch:
    return _batch(job, _encoded(job, QUERY_TOKENS, CALIBRATION_TOKENS, QUERY_ROWS), job.pairs_per_context)


def _two_pass_batch(job: Job) -> tuple[Batch, Batch]:
    """The query's prompt and the content-free prompt, each whole, with a single pair."""
    return _batch(job, _encoded(job, QUERY_TOKENS, 0, QUERY_ROWS), 1), _batch(
        job, _encoded(job, CALIBRATION_TOKENS, 0, CALIBRATION_ROWS), 1
    )


def two_pass_scores(model: torch.nn.Module, query: Batch, calibration: Batch, heads: HeadSet, num_layers: int) -> torch.Tensor:
    """Calibrated scores_BN from two full-depth passes over the two prompts, as the peers compute them."""
    heads_by_layer = {**heads.by_layer(), num_layers - 1: heads.by_layer().get(num_layers - 1, [])}
    of_query = model(query.input_ids_BS, query.layout, heads_by_layer)
    of_nothing = model(calibration.input_ids_BS, calibration.layout, heads_by_layer)
    width = int(min(query.input_ids_BS.shape[1], calibration.input_ids_BS.shape[1]))
    rows = {
        layer: LayerRows(read.heads, read.query_rows[..., :width], of_nothing.rows[layer].query_rows[..., :width])
        for layer, read in of_query.rows.items()
    }
    layout: BranchLayout = dataclasses.replace(query.layout, document_of_token_BS=query.layout.document_of_token_BS[:, :width])
    return core_head_scores(CapturedRows(rows), layout, is_calibrated=True)


def _literal_step(
    model: torch.nn.Module,
    reference: HeadRankModel,
    optimizer: Any,
    batches: Iterator[tuple[Batch, Batch]],
    heads: HeadSet,
    config: TrainingConfig,
) -> None:
    """One step of the paper's text, through the same schedule and the same update as ours."""

    def forward(data: Iterator[tuple[Batch, Batch]], policy: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        query, calibration = next(data)
        num_layers = reference.config.num_layers
        with torch.no_grad():
            anchor_BN = two_pass_scores(reference, query, calibration, heads, num_layers)
        scores_BN = two_pass_scores(policy, query, calibration, heads, num_layers)
        anchored = dataclasses.replace(query, references=tuple(anchor_BN))
        return scores_BN, lambda scores_BN: (batch_loss(scores_BN, anchored, config.loss)[0], {})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=[model],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    guarded_update(optimizer, is_loss_finite=True)
