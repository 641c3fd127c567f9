"""The in-batch term: which passages are negatives, and its value by hand."""

from __future__ import annotations

import math

import torch

from headrank.method.in_batch import best_passages, in_batch_loss, negatives


def test_negatives_are_other_queries_passages_that_the_own_list_does_not_hold() -> None:
    digests, queries = torch.tensor([1, 2, 3, 2, 4, 5]), torch.tensor([7, 7, 8, 8, 8, 7])
    # 4 stands in the own list, though it was not drawn
    mask = negatives(digests, queries, 7, known=torch.tensor([1, 2, 4]))
    assert mask.tolist() == [False, False, True, False, False, False]


def test_the_best_passage_is_the_teachers_else_the_highest_grade_above_zero() -> None:
    grades = torch.tensor([0, 2, 2, -1])
    assert best_passages(None, grades).tolist() == [False, True, True, False]
    assert best_passages(torch.tensor([1.0, math.nan, 0.5, 3.0]), grades).tolist() == [False, False, False, True]
    assert not best_passages(torch.full((4,), math.nan), grades).any()
    assert not best_passages(None, torch.zeros(3, dtype=torch.long)).any()


def test_the_loss_by_hand_and_zero_with_a_gradient_where_nothing_can_be_contrasted() -> None:
    own, everything = torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([2.0, 0.0, 1.0, -1.0])
    best, negative = torch.tensor([True, False]), torch.tensor([False, False, True, True])
    expected = -math.log(math.exp(2) / (math.exp(2) + math.exp(1) + math.exp(-1)))
    assert math.isclose(in_batch_loss(own, best, everything, negative).item(), expected, rel_tol=1e-6)
    nothing = in_batch_loss(own, best, everything, torch.zeros(4, dtype=torch.bool))
    nothing.backward()
    assert nothing.item() == 0 and own.grad is not None and own.grad.tolist() == [0, 0]
