"""The objective's terms against slow loops, hand-computed numbers, finite differences and their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrank.errors import InputError
from headrank.method.loss_settings import SCALINGS, LossSettings
from headrank.method.losses import (
    alignment_loss,
    headrank_loss,
    middle_variance,
    middle_zone,
    proximal_loss,
    ranknet_loss,
    regulariser,
    scale_scores,
    score_entropy,
)

EXACT = 1e-12  # float64 against float64: only the order of additions differs
DIFFERENCE_STEP = 1e-6  # central differences in float64: truncation about 1e-12, rounding about 1e-10
DIFFERENCE_TOLERANCE = 1e-6


def slow_loss(scores, reference, ranks, pairs, s: LossSettings) -> float:
    """The paper's per-pair objective, averaged over pairs, in Python floats; constant scaling only."""
    scores, reference = [s.scale * x for x in scores], [s.scale * x for x in reference]
    count = len(scores)
    total = 0.0
    for chosen, rejected in pairs:
        delta = scores[chosen] - scores[rejected]
        pair = math.log(1 + math.exp(-delta)) + max(0.0, s.margin - delta) - s.linear_weight * delta
        divergence = (scores[chosen] - reference[chosen]) ** 2 + (scores[rejected] - reference[rejected]) ** 2
        pair += s.proximal_weight / 2 * divergence
        normaliser = sum(math.exp(x / s.temperature) for x in scores)
        p = [math.exp(x / s.temperature) / normaliser for x in scores]
        by_rank = sorted(range(count), key=lambda i: ranks[i])
        middle = [scores[i] for place, i in enumerate(by_rank, start=1) if count / 4 < place <= 3 * count / 4]
        mean = sum(middle) / len(middle)
        variance = sum((x - mean) ** 2 for x in middle) / len(middle)
        pair += s.entropy_weight * -sum(x * math.log(x) for x in p) - s.variance_weight * variance
        total += pair
    return total / len(pairs)


def example(seed: int = 0, num_documents: int = 12, num_pairs: int = 5):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_documents, generator=generator, dtype=torch.float64) * 0.1
    reference = torch.randn(num_documents, generator=generator, dtype=torch.float64) * 0.1
    ranks = torch.randperm(num_documents, generator=generator) + 1
    pairs = torch.stack([torch.randperm(num_documents, generator=generator)[:2] for _ in range(num_pairs)])
    return scores, reference, ranks, pairs


@pytest.mark.parametrize("seed", range(5))
def test_total_is_the_mean_over_pairs_of_the_papers_per_pair_objective(seed):
    scores, reference, ranks, pairs = example(seed)
    chosen = LossSettings(entropy_weight=0.3, variance_weight=0.2, proximal_weight=0.7, temperature=1.7)
    total = headrank_loss(scores, reference, ranks, pairs, chosen).total
    assert (
        abs(float(total) - slow_loss(scores.tolist(), reference.tolist(), ranks.tolist(), pairs.tolist(), chosen))
        < EXACT
    )


def test_alignment_of_two_pairs_by_hand():
    value = alignment_loss(torch.tensor([0.0, 2.0], dtype=torch.float64), margin=1.0, linear_weight=0.05)
    first = math.log(2) + 1.0 - 0.0
    second = math.log(1 + math.exp(-2)) + 0.0 - 0.1
    assert abs(float(value) - (first + second) / 2) < EXACT


def test_proximal_by_hand():
    scores, reference = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0, 2.0, -5.0])
    assert float(proximal_loss(scores, reference, torch.tensor([0]), torch.tensor([1]), weight=0.05)) == pytest.approx(
        0.125
    )


def test_ranknet_is_the_logistic_loss():
    assert float(ranknet_loss(torch.tensor([0.0]))) == pytest.approx(math.log(2))


def test_entropy_of_equal_scores_is_log_n():
    assert float(score_entropy(torch.zeros(40))) == pytest.approx(math.log(40), rel=1e-6)


@pytest.mark.parametrize(("count", "first", "last"), [(40, 11, 30), (20, 6, 15), (100, 26, 75), (4, 2, 3)])
def test_middle_zone_has_the_papers_ranks(count, first, last):
    ranks = torch.arange(1, count + 1)
    assert ranks[middle_zone(ranks)].tolist() == list(range(first, last + 1))


def test_middle_zone_follows_retrieval_ranks_not_the_order_in_the_prompt():
    ranks = torch.randperm(20, generator=torch.Generator().manual_seed(3)) + 1
    assert sorted(ranks[middle_zone(ranks)].tolist()) == list(range(6, 16))


def test_lists_too_short_for_a_middle_zone_have_no_variance():
    scores = torch.tensor([0.3, -0.2], requires_grad=True)
    value = middle_variance(scores, torch.tensor([1, 2]))
    value.backward()
    assert value.item() == 0.0 and scores.grad.abs().max() == 0.0


@pytest.mark.parametrize("objective", ["headrank", "ranknet"])
def test_gradient_equals_finite_differences_under_constant_scaling(objective):
    scores, reference, ranks, pairs = example(seed=1)
    chosen = LossSettings(objective=objective, entropy_weight=0.3, variance_weight=0.2, proximal_weight=0.7)

    def value(point: torch.Tensor) -> torch.Tensor:
        return headrank_loss(point, reference, ranks, pairs, chosen).total

    point = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(point), point)
    for index in range(len(scores)):
        step = torch.zeros_like(scores)
        step[index] = DIFFERENCE_STEP
        slope = (value(scores + step) - value(scores - step)) / (2 * DIFFERENCE_STEP)
        assert abs(float(slope - gradient[index])) < DIFFERENCE_TOLERANCE


@pytest.mark.parametrize("scaling", ["standardise", "max-min"])
def test_list_statistics_carry_no_gradient(scaling):
    scores, _, _, _ = example(seed=2)
    point = scores.clone().requires_grad_()
    scaled = scale_scores(point, scaling, 1.0)
    (gradient,) = torch.autograd.grad(scaled[3] - scaled[5], point)
    assert sorted(torch.nonzero(gradient).flatten().tolist()) == [3, 5]


def test_standardised_scores_have_the_stated_mean_and_deviation():
    scaled = scale_scores(example(seed=4)[0], "standardise", 2.0)
    assert abs(float(scaled.mean())) < EXACT and float(scaled.std(correction=0)) == pytest.approx(2.0)


def test_max_min_scores_span_zero_to_the_scale():
    scaled = scale_scores(example(seed=4)[0], "max-min", 4.0)
    assert float(scaled.min()) == 0.0 and float(scaled.max()) == pytest.approx(4.0)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_equal_scores_stay_finite_and_keep_a_gradient(scaling):
    scores = torch.full((8,), 0.05, requires_grad=True)
    loss = headrank_loss(
        scores, scores.detach(), torch.arange(8), torch.tensor([[0, 1]]), LossSettings(scaling=scaling)
    ).total
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(scores.grad).all() and scores.grad[0] < 0 < scores.grad[1]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_proximal_term_is_zero_at_the_reference(scaling):
    scores, _, ranks, pairs = example(seed=5)
    assert float(headrank_loss(scores, scores, ranks, pairs, LossSettings(scaling=scaling)).proximal) == 0.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-2.0, 2.0))
def test_without_the_anchor_a_common_shift_of_all_scores_changes_nothing(seed, shift):
    scores, _, ranks, pairs = example(seed)
    chosen = LossSettings(proximal_weight=0.0)
    before = headrank_loss(scores, None, ranks, pairs, chosen).total
    after = headrank_loss(scores + shift, None, ranks, pairs, chosen).total
    assert abs(float(before - after)) < 1e-9  # float64 after adding a shift a hundred times the spread


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_documents_in_the_prompt_does_not_matter(seed):
    scores, reference, ranks, pairs = example(seed)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    inverse = torch.argsort(order)
    here = headrank_loss(scores, reference, ranks, pairs, LossSettings()).total
    there = headrank_loss(scores[order], reference[order], ranks[order], inverse[pairs], LossSettings()).total
    assert abs(float(here - there)) < EXACT


def test_zero_weights_remove_their_terms():
    scores, reference, ranks, pairs = example(seed=6)
    full = headrank_loss(scores, reference, ranks, pairs, LossSettings())
    bare = headrank_loss(
        scores, None, ranks, pairs, LossSettings(proximal_weight=0, entropy_weight=0, variance_weight=0)
    )
    assert float(bare.total) == float(bare.align) == float(full.align)
    assert float(full.total) != float(bare.total)


def test_accuracy_counts_a_tie_as_half():
    scores = torch.tensor([1.0, 0.0, 0.0])
    terms = headrank_loss(scores, scores, torch.arange(3), torch.tensor([[0, 1], [1, 2]]), LossSettings())
    assert float(terms.accuracy) == 0.75


def test_omega_by_hand():
    scores = torch.tensor([0.0, 1.0, 3.0, 0.0], dtype=torch.float64)  # middle zone of four: ranks 2 and 3
    value = regulariser(scores, torch.tensor([1, 2, 3, 4]), entropy_weight=2.0, variance_weight=3.0)
    p = torch.softmax(scores, 0)
    assert float(value) == pytest.approx(2.0 * float(-(p * p.log()).sum()) - 3.0 * 1.0)


@pytest.mark.parametrize(
    "change",
    [
        *({"objective": "dpo"}, {"scaling": "log"}, {"scale": 0.0}, {"margin": -1.0}, {"temperature": float("nan")}),
        *({"scale": float("inf")}, {"linear_weight": float("inf")}, {"variance_weight": float("nan")}),
    ],
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(InputError):
        replace(LossSettings(), **change)


def test_a_context_without_pairs_is_a_programming_error():
    with pytest.raises(ValueError, match="pairs"):
        headrank_loss(torch.zeros(3), None, torch.arange(3), torch.zeros(0, 2, dtype=torch.long), LossSettings())
