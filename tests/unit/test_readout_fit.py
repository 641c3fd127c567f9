"""The fit of a readout: against slow loops and another optimiser, what it must find, and nested cross-validation
that does not peek.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from headrank.errors import InputError
from headrank.selection.readout_fit import (
    Problem,
    choose_groups,
    fit_group_lasso,
    fit_ridge,
    list_pairs,
    log_mass_values,
    median_offsets,
)
from headrank.selection.readout_lists import ReadoutList
from headrank.selection.readout_validation import (
    CrossValidation,
    FitSettings,
    Row,
    Size,
    cheapest_within,
    make_folds,
    read_folds,
)

GROUPS = [np.arange(start, start + 2) for start in range(0, 8, 2)]


def made_list(number: int, generator: np.random.Generator, values_NK: np.ndarray, truth_K: np.ndarray) -> ReadoutList:
    teacher = 2.5 * values_NK @ truth_K + generator.normal(size=len(values_NK)) * 0.3
    grades = tuple(int(value > 0.5) for value in teacher)
    names = tuple(f"d{place}" for place in range(len(values_NK)))
    judged = dict(zip(names, grades, strict=True))
    return ReadoutList(
        "toy", f"q{number}", "?", names, tuple(("", name) for name in names), grades, tuple(teacher), judged
    )


def made_lists(count: int = 30, seed: int = 0) -> tuple[list[ReadoutList], list[np.ndarray]]:
    """Eight features, of which only 2 and 3 (one group) and 6 tell passages apart."""
    generator = np.random.default_rng(seed)
    truth_K = np.array([0, 0, 1.0, -0.8, 0, 0, 0.5, 0])
    values = [generator.normal(size=(generator.integers(4, 9), 8)) * (1 + np.arange(8)) for _ in range(count)]
    return [
        made_list(number, generator, each / (1 + np.arange(8)), truth_K) for number, each in enumerate(values)
    ], values


def test_pairs_of_one_list_by_hand() -> None:
    one = ReadoutList("toy", "q", "?", ("a", "b", "c"), (("", ""),) * 3, (2, None, 0), (3.0, 2.5, 1.0), {})
    first, second, target, weight = list_pairs(one, "judged")
    assert (first.tolist(), second.tolist(), target.tolist(), weight.tolist()) == ([0], [2], [1.0], [1.0])
    first, second, target, weight = list_pairs(one, "teacher")
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 2), (1, 2)], "a and b are half a logit apart"
    assert target.tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1.5))])
    assert list_pairs(one, "both")[3].tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_the_loss_equals_loops_over_queries_and_pairs_and_its_gradient_finite_differences() -> None:
    lists, values = made_lists(5)
    problem = Problem(lists, values, "teacher")
    weights_K = np.linspace(-0.3, 0.4, 8)
    total = 0.0
    for one, values_NK in zip(lists, values, strict=True):
        assert one.teacher is not None
        terms = []
        for i, ti in enumerate(one.teacher):
            for j, tj in enumerate(one.teacher):
                if ti - tj >= 1:
                    margin = sum(
                        weights_K[k] / problem.scale_K[k] * (values_NK[i, k] - values_NK[j, k]) for k in range(8)
                    )
                    sure = 1 / (1 + math.exp(tj - ti))
                    terms.append(
                        -sure * math.log(1 / (1 + math.exp(-margin)))
                        - (1 - sure) * math.log(1 / (1 + math.exp(margin)))
                    )
        total += math.fsum(terms) / len(terms) / len(lists)
    loss, gradient = problem.loss(weights_K)
    assert loss == pytest.approx(total, abs=1e-9)
    for k in range(8):
        step = np.eye(8)[k] * 1e-6
        difference = (problem.loss(weights_K + step)[0] - problem.loss(weights_K - step)[0]) / 2e-6
        assert gradient[k] == pytest.approx(difference, abs=1e-6)


def test_a_query_with_many_pairs_counts_as_one_query() -> None:
    lists, values = made_lists(4)
    long, short = Problem(lists, values, "teacher"), Problem(lists[:1], values[:1], "teacher")
    assert long.pairs.weight_P.sum() == pytest.approx(1.0) == short.pairs.weight_P.sum()
    for start, one in zip(np.cumsum([0, *map(len, values)]), values, strict=False):
        of_list = (long.pairs.first_P >= start) & (long.pairs.first_P < start + len(one))
        assert long.pairs.weight_P[of_list].sum() == pytest.approx(0.25)


def test_the_ridge_fit_is_the_minimum_whatever_the_order_of_the_lists() -> None:
    lists, values = made_lists()
    problem = Problem(lists, values, "judged")
    found = fit_ridge(problem, 0.01)
    slow = minimize(
        lambda w: problem.loss(w)[0] + 0.005 * w @ w,
        np.full(8, 0.3),
        method="Powell",
        options={"xtol": 1e-8, "ftol": 1e-12},
    )
    assert np.allclose(found, slow.x, atol=1e-3)
    backwards = Problem(lists[::-1], values[::-1], "judged")
    assert np.allclose(found / problem.scale_K, fit_ridge(backwards, 0.01) / backwards.scale_K, atol=1e-4)
    assert np.array_equal(found, fit_ridge(problem, 0.01)), "the same input, the same bits"


def test_the_group_lasso_meets_its_optimality_conditions_and_finds_the_groups_that_matter() -> None:
    lists, values = made_lists(60)
    problem, l2, penalty = Problem(lists, values, "teacher"), 1e-3, 0.02
    weights_K = fit_group_lasso(problem, GROUPS, penalty, l2, np.zeros(8))
    gradient = problem.loss(weights_K)[1] + l2 * weights_K
    for group in GROUPS:
        norm = np.linalg.norm(weights_K[group])
        if norm > 0:
            assert np.allclose(gradient[group], -penalty * 2**0.5 * weights_K[group] / norm, atol=1e-4)
        else:
            assert np.linalg.norm(gradient[group]) <= penalty * 2**0.5 + 1e-4
    assert choose_groups(problem, GROUPS, 1, l2) == [1] and choose_groups(problem, GROUPS, 2, l2) == [1, 3]
    assert choose_groups(problem, GROUPS, 9, l2) == [0, 1, 2, 3]
    refitted = fit_ridge(problem, l2, np.concatenate([GROUPS[1], GROUPS[3]]))
    assert (refitted[[0, 1, 4, 5]] == 0).all() and np.linalg.norm(refitted) > np.linalg.norm(weights_K), (
        "the refit shrinks less"
    )


@settings(max_examples=25, deadline=None)
@given(floor=st.sampled_from([0.0, 0.1, 1.0]), shift=st.floats(-3, 3))
def test_values_are_the_mean_log_and_offsets_their_heads_median(floor: float, shift: float) -> None:
    generator = np.random.default_rng(3)
    ratios = [generator.normal(size=(4, 2, 3)).astype(np.float16), generator.normal(size=(2, 2, 5)).astype(np.float16)]
    offsets_K = median_offsets(ratios, 2)
    pooled = [float(value) for one in ratios for value in one[:, 0].ravel()]
    assert offsets_K[0] == pytest.approx(float(np.median(pooled)))
    values = log_mass_values(ratios[0], offsets_K + shift, floor)
    expected = np.mean([math.log(math.exp(float(ratios[0][1, 1, r]) - offsets_K[1] - shift) + floor) for r in range(3)])
    assert values[1, 1] == pytest.approx(expected, abs=1e-4)


def validation(lists: list[ReadoutList], values: list[np.ndarray], **more: object) -> CrossValidation:
    ratios = [each[:, :, None].astype(np.float16) for each in values]  # one row, no floor: the value is the ratio
    lengths = [np.full(len(each), 7) for each in values]
    chosen = FitSettings(**{"labels": "judged", "l2": (1e-3, 0.1), "floors": (0.0,), **more})  # type: ignore[arg-type]
    return CrossValidation(lists, ratios, lengths, make_folds(lists, 4), num_heads=4, group_size=2, settings=chosen)


def test_cross_validation_finds_what_is_there_and_nothing_in_noise() -> None:
    lists, values = made_lists(40)
    real = validation(lists, values).row(Size(2))
    assert real.accuracy > 85 and real.quality > 85
    generator = np.random.default_rng(5)
    noise = [generator.normal(size=each.shape) for each in values]
    assert 38 < validation(lists, noise).row(Size(2)).accuracy < 62, "a fold that peeked would remember its queries"
    shallow = validation(lists, values).row(Size(1))
    assert shallow.quality < real.quality and set(real.per_query) == {one.key for one in lists}


def test_a_held_out_query_moves_no_number_of_its_own_prediction() -> None:
    lists, values = made_lists(16)
    one = validation(lists, values)
    held = [index for index in range(16) if one.folds[index] == 0]
    changed = [each * (1 if index not in held else -3) for index, each in enumerate(values)]
    training = [index for index in range(16) if index not in held]
    first, second = (validation(lists, each).fit(Size(2, 2), training, 0) for each in (values, changed))
    assert np.array_equal(first.weights_K, second.weights_K) and np.array_equal(first.offsets_K, second.offsets_K)


def test_a_budget_leaves_out_whole_groups_and_depth_whole_layers() -> None:
    lists, values = made_lists(40)
    fitted = validation(lists, values).fit(Size(2, 2))
    assert fitted.groups == (1, 3) and set(np.nonzero(fitted.weights_K)[0]) == {2, 3, 6, 7}
    assert validation(lists, values).fit(Size(1)).weights_K.shape == (4,)


def test_equal_weights_count_every_chosen_head_alike() -> None:
    lists, values = made_lists(40)
    fitted = validation(lists, values, is_equal=True).fit(Size(2, 2))
    assert (
        fitted.groups == (1, 3)
        and fitted.weights_K[[2, 3, 6, 7]] == pytest.approx(0.25)
        and not fitted.weights_K[[0, 1, 4, 5]].any()
    )
    assert validation(lists, values, is_equal=True).fit(Size(1)).weights_K == pytest.approx(0.25)


def test_the_length_feature_uses_lengths_when_they_matter() -> None:
    lists, values = made_lists(40)
    generator = np.random.default_rng(9)
    with_noise = validation(lists, [generator.normal(size=each.shape) for each in values], with_length=True)
    with_noise.lengths = [np.exp(np.array(one.teacher)) for one in lists]
    assert with_noise.row(Size(2)).accuracy > 90


def test_the_cheapest_within_the_tolerance_is_taken() -> None:
    rows = [
        Row(Size(layers, groups), quality, {}, 0.0, ())
        for layers, groups, quality in [(30, None, 45.0), (20, None, 44.6), (20, 16, 44.0)]
    ]
    assert (
        cheapest_within(rows, 0.0) is rows[0]
        and cheapest_within(rows, 0.5) is rows[1]
        and cheapest_within(rows, 1.0) is rows[2]
    )


def test_folds_are_balanced_and_come_from_a_file_where_one_is_given(tmp_path: Path) -> None:
    lists, _ = made_lists(10)
    folds = make_folds(lists, 5)
    assert sorted(folds) == sorted([0, 1, 2, 3, 4] * 2) and make_folds(lists[::-1], 5) == folds[::-1]
    (tmp_path / "folds.txt").write_text("".join(f"q{number} {number % 2}\n" for number in range(10)))
    assert read_folds(str(tmp_path / "folds.txt"), lists) == [0, 1] * 5
    for text, said in [
        ("q0 x\n", "folds.txt:1: expected"),
        ("q0 1\n", "9 lists have no fold"),
        ("".join(f"q{n} 1\n" for n in range(10)), "one fold"),
    ]:
        (tmp_path / "folds.txt").write_text(text)
        with pytest.raises(InputError, match=said):
            read_folds(str(tmp_path / "folds.txt"), lists)
