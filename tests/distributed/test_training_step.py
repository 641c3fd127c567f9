"""Training steps in a world of one: the literal recipe's gradient, exact truncation, a bad step that leaves no
trace.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.literal_recipe import literal_backward
from headrank.method.heads import HeadSet
from headrank.method.loss_settings import LossSettings
from megatron_patches import device
from megatron_patches.checkpoints.weights import load_hf_weights
from megatron_patches.shape import ModelShape
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.assembly import build_optimizer, build_policy, count_parameters, wrap_model
from megatron_patches.training.batches import length_multiple, make_batch, training_batches
from megatron_patches.training.config import config_from
from megatron_patches.training.data_setup import open_training_set
from megatron_patches.training.held_out import score_sample
from megatron_patches.training.reference import ReferenceScores, needed_contexts
from megatron_patches.training.train_step import batch_loss, score_batch, train_step
from tests.toy_training import make_toy_job

SAME_GRADIENT = 1e-5  # relative to the largest entry: float32 sums in another order
SAME_WEIGHTS = 3e-5  # three AdamW steps move a weight by 3e-3; rounding of a tiny gradient turns a hundredth of that


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    device.initialize(1)
    yield make_toy_job(tmp_path_factory.mktemp("toy"))
    device.shutdown()


class Job:
    """The parts of a toy run, built as prepare_run does but kept in hand."""

    def __init__(self, toy, *flags: str) -> None:
        self.config = config_from(parse_arguments(toy.flags("--train-iters", "10", *flags)), 1)
        self.shape = ModelShape.from_hf(str(toy.model))
        self.heads = HeadSet.load(toy.heads)
        self.data = open_training_set(self.config, self.shape, self.heads, str(toy.train))
        self.policy = build_policy(self.config, self.shape, self.heads)
        load_hf_weights(self.policy, str(toy.model))
        self.where = torch.device("cpu")
        self.reference = ReferenceScores(None, {})
        needed = needed_contexts(self.data, 10 * self.config.global_batch_size)
        samples = (self.data.whole_context(*place) for place in needed)
        self.reference.compute(samples, lambda sample: score_sample(self.policy, sample, self.heads, self.where))

    def batches(self):
        sizes = {"start": 0, "rank": 0, "world_size": 1, "micro_batch_size": self.config.micro_batch_size}
        return training_batches(self.data, self.reference, where=self.where, **sizes)

    def trainer(self):
        model = wrap_model(self.config, self.policy)
        optimizer, scheduler = build_optimizer(self.config, model)
        return model, optimizer, scheduler

    def step(self, model, optimizer, batches):
        return train_step(model, optimizer, batches, self.heads, self.config.loss, self.config.num_microbatches)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("permutations", ["0", "2"])
def test_one_shared_truncated_forward_has_the_literal_recipes_gradient(toy, permutations):
    ours = Job(toy, "--headrank-permutations", permutations)
    literal, frozen = Job(toy, "--headrank-full-depth").policy, Job(toy, "--headrank-full-depth").policy
    settings = LossSettings(entropy_weight=0.3, variance_weight=0.2, proximal_weight=0.5)
    with torch.no_grad():  # away from the reference, so that the proximal term has a gradient
        for one, other in ((ours.policy, 1.0), (literal, 1.0)):
            one.embedding.word_embeddings.weight.mul_(1.05 * other)
    sample = ours.data.at(0)
    batch = make_batch((sample,), ours.reference, ours.where)
    total, _ = batch_loss(score_batch(ours.policy, batch, ours.heads), batch, settings)
    total.backward()
    expected = literal_backward(literal, frozen, sample, ours.heads, settings)
    assert abs(total.item() - expected) < SAME_GRADIENT * abs(expected)
    mine, theirs = gradients(ours.policy), gradients(literal)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in mine.items():
        other = (
            theirs[name]
            if name in theirs
            else query_key_rows(theirs[name.replace("linear_qk.", "linear_qkv.")], ours.shape)
        )
        assert float((gradient - other).abs().max()) < SAME_GRADIENT * largest, name


def test_a_length_that_sequence_parallelism_can_split_changes_no_score(toy):
    job = Job(toy)
    sample = job.data.at(0)
    multiple = next(number for number in (7, 8, 9) if sample.encoded.length % number)
    plain, padded = (make_batch((sample,), job.reference, job.where, number) for number in (1, multiple))
    lengths = plain.input_ids_BS.shape[1], padded.input_ids_BS.shape[1]
    assert lengths[1] % multiple == 0 and 0 < lengths[1] - lengths[0] < multiple
    with torch.no_grad():
        scores, same = (score_batch(job.policy, batch, job.heads)[0] for batch in (plain, padded))
    assert torch.allclose(scores, same, atol=1e-6)
    for is_on, expected in ((False, 1), (True, 4)):
        config = dataclasses.replace(job.policy.config, sequence_parallel=is_on, tensor_model_parallel_size=4)
        assert length_multiple(config) == expected


def query_key_rows(fused: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """The rows of a fused QKV matrix without the values, group by group."""
    per_group = (shape.heads // shape.groups + 1) * shape.head_dim
    return fused.unflatten(0, (shape.groups, -1))[:, :per_group].flatten(0, 1)


def test_training_truncated_is_training_full_depth(toy):
    losses, weights = [], []
    for flags in ((), ("--headrank-full-depth",)):
        job = Job(toy, *flags, "--weight-decay", "0.1")
        model, optimizer, _ = job.trainer()
        batches = job.batches()
        losses.append([job.step(model, optimizer, batches).terms["total"] for _ in range(3)])
        weights.append(dict(job.policy.named_parameters()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    truncated, full = weights
    for name, value in truncated.items():
        other = (
            full[name] if name in full else query_key_rows(full[name.replace("linear_qk.", "linear_qkv.")], job.shape)
        )
        assert float((value - other).abs().max()) < SAME_WEIGHTS, name
    untouched = Job(toy, "--headrank-full-depth").policy
    for name, value in untouched.named_parameters():
        if name not in truncated and "linear_qkv" not in name:
            assert torch.equal(value, full[name]), f"{name} must stay as it was"


def test_the_saving_is_counted_right(toy):
    job, full = Job(toy), Job(toy, "--headrank-full-depth")
    assert count_parameters(job.shape, job.heads.l_max) == sum(p.numel() for p in job.policy.parameters())
    # + final norm
    assert count_parameters(job.shape) == sum(p.numel() for p in full.policy.parameters()) + job.shape.hidden


def test_micro_batches_do_not_change_the_step(toy):
    outcomes = []
    for micro in ("1", "2", "4"):
        job = Job(toy, "--global-batch-size", "4", "--micro-batch-size", micro)
        model, optimizer, _ = job.trainer()
        result = job.step(model, optimizer, job.batches())
        outcomes.append((result.terms["total"], result.grad_norm))
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)
    assert outcomes[2] == pytest.approx(outcomes[0], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_changes_neither_weights_nor_moments_and_names_the_query(toy, bad):
    job = Job(toy)
    model, optimizer, _ = job.trainer()
    batches = job.batches()
    job.step(model, optimizer, batches)
    before = {name: value.detach().clone() for name, value in job.policy.named_parameters()}
    moments = [state["exp_avg"].clone() for state in optimizer.chained_optimizers[0].optimizer.state.values()]
    batch = next(batches)
    poisoned = type(batch)(**{**vars(batch), "references": (torch.full_like(batch.references[0], bad),)})
    result = job.step(model, optimizer, iter([poisoned]))
    assert not result.is_updated and result.bad_queries == (batch.samples[0].query_id,)
    assert all(torch.equal(before[name], value) for name, value in job.policy.named_parameters())
    assert all(
        torch.equal(old, state["exp_avg"])
        for old, state in zip(moments, optimizer.chained_optimizers[0].optimizer.state.values(), strict=True)
    )
    assert job.step(model, optimizer, batches).is_updated
