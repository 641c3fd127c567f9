"""The teacher's terms against slow loops, numbers computed by hand, finite differences and their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrank.errors import InputError
from headrank.method.distillation import (
    listwise_kl_loss,
    margin_mse_loss,
    pair_agreement,
    teacher_loss,
    teacher_ranknet_loss,
)
from headrank.method.loss_settings import LossSettings
from headrank.method.losses import headrank_loss

EXACT = 1e-12  # float64 against float64: only the order of additions differs
DIFFERENCE_STEP, DIFFERENCE_TOLERANCE = 1e-6, 1e-6
ALL_TERMS = LossSettings(
    teacher_ranknet_weight=0.7, teacher_listwise_weight=0.5, teacher_margin_weight=0.1, teacher_temperature=2.0
)
QUARTERS = st.integers(-32, 32).map(lambda number: number / 4)  # exact sums, so that ties stay ties
LISTS = st.lists(st.tuples(QUARTERS, QUARTERS), min_size=2, max_size=9)


def example(seed: int = 0, num_documents: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores, teacher = torch.randn(2, num_documents, generator=generator, dtype=torch.float64)
    return scores, 4 * teacher


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_terms(scores: list[float], teacher: list[float]) -> tuple[float, float, float]:
    pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if i < j]
    ranknet = squared = 0.0
    for i, j in pairs:
        label, guess = sigma(teacher[i] - teacher[j]), sigma(scores[i] - scores[j])
        ranknet -= label * math.log(guess) + (1 - label) * math.log(1 - guess)
        squared += ((scores[i] - scores[j]) - (teacher[i] - teacher[j])) ** 2
    p_sum, q_sum = sum(map(math.exp, teacher)), sum(map(math.exp, scores))
    divergence = sum(
        math.exp(t) / p_sum * math.log(math.exp(t) / p_sum / (math.exp(s) / q_sum))
        for s, t in zip(scores, teacher, strict=True)
    )
    return ranknet / len(pairs), divergence, squared / len(pairs)


@pytest.mark.parametrize("seed", range(4))
def test_every_term_is_the_mean_that_its_docstring_states(seed):
    scores, teacher = example(seed)
    found = [float(term(scores, teacher)) for term in (teacher_ranknet_loss, listwise_kl_loss, margin_mse_loss)]
    assert found == pytest.approx(slow_terms(scores.tolist(), teacher.tolist()), abs=1e-10)


def test_terms_of_two_documents_by_hand():
    scores, teacher = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 0.0], dtype=torch.float64)
    assert float(teacher_ranknet_loss(scores, teacher)) == pytest.approx(
        0.5 * math.log(1 + math.exp(-1)) + 0.5 * math.log(1 + math.e)
    )
    assert float(listwise_kl_loss(scores, teacher)) == pytest.approx(
        -math.log(2) - 0.5 * (math.log(sigma(1)) + math.log(sigma(-1)))
    )
    assert float(margin_mse_loss(scores, teacher)) == 1.0
    assert float(pair_agreement(scores, teacher)) == 0.5  # the teacher orders nothing


@given(LISTS, QUARTERS)
def test_an_offset_of_scores_or_teacher_changes_nothing(rows, offset):
    scores, teacher = torch.tensor(rows, dtype=torch.float64).T
    for term in (teacher_ranknet_loss, listwise_kl_loss, margin_mse_loss, pair_agreement):
        assert float(term(scores + offset, teacher)) == pytest.approx(float(term(scores, teacher)), abs=1e-6)
        assert float(term(scores, teacher + offset)) == pytest.approx(float(term(scores, teacher)), abs=1e-6)


@given(LISTS)
def test_no_scores_are_better_than_the_teachers_own(rows):
    scores, teacher = torch.tensor(rows, dtype=torch.float64).T
    for term in (teacher_ranknet_loss, listwise_kl_loss, margin_mse_loss):
        assert float(term(scores, teacher)) >= float(term(teacher, teacher)) - 1e-9


def test_gradients_are_those_of_finite_differences():
    scores, teacher = example(2)
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(teacher_loss(scores, teacher, ALL_TERMS).total, scores)
    for index in range(len(scores)):
        step = torch.zeros_like(scores)
        step[index] = DIFFERENCE_STEP
        ends = [float(teacher_loss((scores + sign * step).detach(), teacher, ALL_TERMS).total) for sign in (1, -1)]
        assert abs(float(gradient[index]) - (ends[0] - ends[1]) / (2 * DIFFERENCE_STEP)) < DIFFERENCE_TOLERANCE


def test_documents_without_a_teachers_score_take_no_part():
    scores, teacher = example(1)
    hole = teacher.clone()
    hole[[1, 4]] = math.nan
    rest = [0, 2, 3, 5, 6]
    assert float(teacher_loss(scores, hole, ALL_TERMS).total) == pytest.approx(
        float(teacher_loss(scores[rest], teacher[rest], ALL_TERMS).total)
    )
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(teacher_loss(scores, hole, ALL_TERMS).total, scores)
    assert gradient.isfinite().all() and (gradient[[1, 4]] == 0).all() and (gradient[rest] != 0).all()


@pytest.mark.parametrize("teacher", [None, [math.nan] * 7, [1.0] + [math.nan] * 6])
def test_a_list_with_fewer_than_two_graded_documents_teaches_nothing_but_stays_in_the_graph(teacher):
    scores = example()[0].requires_grad_()
    found = teacher_loss(scores, None if teacher is None else torch.tensor(teacher), ALL_TERMS)
    assert found.total.item() == 0.0
    assert (torch.autograd.grad(found.total, scores)[0] == 0).all()


def test_the_temperature_divides_the_teachers_scores():
    scores, teacher = example(3)
    warm = replace(ALL_TERMS, teacher_temperature=1.0)
    assert float(teacher_loss(scores, teacher, ALL_TERMS).total) == pytest.approx(
        float(teacher_loss(scores, teacher / 2, warm).total)
    )


def test_accuracy_counts_the_pairs_that_the_teacher_orders():
    scores = torch.tensor([3.0, 2.0, 2.0])
    assert float(pair_agreement(scores, torch.tensor([5.0, 1.0, 4.0]))) == pytest.approx((1 + 1 + 0.5) / 3)
    assert float(pair_agreement(scores, torch.tensor([1.0, 1.0, 4.0]))) == pytest.approx((0 + 0.5) / 2)


def test_the_teachers_terms_stand_beside_the_preference_loss_and_alone_need_no_pairs():
    scores, teacher = example(4)
    ranks, pairs = torch.arange(1, 8), torch.tensor([[0, 1], [2, 3]])
    plain = LossSettings(proximal_weight=0.0, scale=1.0)
    both = replace(plain, teacher_ranknet_weight=0.3)
    alone = replace(both, objective="teacher")
    no_pairs = torch.empty(0, 2, dtype=torch.long)
    term = 0.3 * float(teacher_ranknet_loss(scores, teacher))
    preference = float(headrank_loss(scores, None, ranks, pairs, plain).total)
    found = headrank_loss(scores, None, ranks, pairs, both, teacher)
    assert float(found.total) == pytest.approx(preference + term, abs=EXACT) and float(found.teacher) == pytest.approx(
        term, abs=EXACT
    )
    found = headrank_loss(scores, None, ranks, no_pairs, alone, teacher)
    assert float(found.total) == pytest.approx(term, abs=EXACT) and float(found.accuracy) == 0.0


def test_the_teachers_objective_without_a_weight_is_refused():
    with pytest.raises(InputError, match="'teacher'.*weights are 0"):
        LossSettings(objective="teacher")


def test_a_centred_proximal_term_ignores_the_lists_offset():
    scores, reference = example(5)
    ranks, pairs = torch.arange(1, 8), torch.tensor([[0, 1], [2, 3]])
    plain = LossSettings(scale=1.0, proximal_weight=0.4)
    centred = replace(plain, is_proximal_centred=True)
    found = [float(headrank_loss(scores, reference + offset, ranks, pairs, centred).proximal) for offset in (0.0, 7.0)]
    assert found[0] == pytest.approx(found[1])
    by_hand = ((scores - scores.mean()) - (reference - reference.mean())).square()
    assert found[0] == pytest.approx(0.2 * float(by_hand[[0, 1, 2, 3]].sum()) / 2)
    assert float(headrank_loss(scores, reference + 7.0, ranks, pairs, plain).proximal) > 2 * found[0]
