"""Paired tests, Holm's correction and bootstrap intervals, each against an obvious reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.errors import InputError
from headrank.evaluation.comparison import Settings, compare
from headrank.evaluation.measures import Evaluation
from headrank.evaluation.significance import (
    EXACT_UP_TO,
    bootstrap_interval,
    holm,
    paired_randomisation,
    paired_t,
    paired_test,
)
from headrank.reports.comparison_text import render


def test_randomisation_of_few_queries_enumerates_every_sign_pattern() -> None:
    first, second = [0.9, 0.8, 0.4, 0.7], [0.5, 0.6, 0.5, 0.1]
    differences = np.subtract(first, second)
    sums = [abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=4)]
    expected = np.mean([value >= abs(differences.sum()) - 1e-12 for value in sums])
    assert paired_randomisation(first, second) == pytest.approx(expected) == pytest.approx(4 / 16)


def test_sampled_randomisation_agrees_with_the_t_test_on_many_queries() -> None:
    generator = np.random.default_rng(3)
    first = generator.normal(0.5, 0.2, 200)
    second = first + generator.normal(0.02, 0.15, 200)
    assert len(first) > EXACT_UP_TO
    assert paired_randomisation(first, second, seed=1) == pytest.approx(paired_t(first, second), abs=0.01)


def test_the_same_seed_gives_the_same_p_value_and_another_seed_may_not() -> None:
    first, second = np.linspace(0, 1, 40), np.linspace(0.05, 0.9, 40)[::-1]
    assert paired_randomisation(first, second, seed=7) == paired_randomisation(first, second, seed=7)


def test_t_test_equals_scipys() -> None:
    from scipy.stats import ttest_rel

    first, second = [0.1, 0.5, 0.3, 0.9, 0.2], [0.2, 0.4, 0.6, 0.95, 0.4]
    assert paired_t(first, second) == pytest.approx(ttest_rel(first, second).pvalue)


@pytest.mark.parametrize("test", ["randomisation", "t"])
def test_equal_runs_are_not_different(test: str) -> None:
    assert paired_test([0.2, 0.4], [0.2, 0.4], test) == 1.0


def test_tests_refuse_lists_of_different_length() -> None:
    with pytest.raises(InputError, match="same queries"):
        paired_t([1.0], [1.0, 2.0])


def test_holm_on_the_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(raw <= new <= 1 for raw, new in zip(p_values, adjusted, strict=True))
    ranked = [new for _, new in sorted(zip(p_values, adjusted, strict=True))]
    assert ranked == sorted(ranked)


def test_bootstrap_interval_is_near_the_normal_one_and_repeats() -> None:
    sample = np.random.default_rng(0).normal(0.5, 0.1, 400)
    low, high = bootstrap_interval(sample, seed=5)
    half = 1.96 * sample.std() / 20
    assert (low, high) == pytest.approx((sample.mean() - half, sample.mean() + half), abs=0.002)
    assert (low, high) == bootstrap_interval(sample, seed=5)


def test_bootstrap_of_nothing_or_at_a_silly_level_is_refused() -> None:
    with pytest.raises(InputError, match="no queries"):
        bootstrap_interval([])
    with pytest.raises(InputError, match="confidence level 95"):
        bootstrap_interval([1.0], level=95)


def evaluation(values: dict[str, float]) -> Evaluation:
    return Evaluation({"nDCG@10": values}, 0, 0, 0)


RUNS = {
    "bm25": evaluation({"1": 0.2, "2": 0.5, "3": 0.5}),
    "icr": evaluation({"1": 0.4, "2": 0.4, "3": 0.5}),
    "ours": evaluation({"1": 0.6, "2": 0.7, "3": 0.9}),
}


def test_each_run_is_compared_with_the_first_and_corrected_within_the_measure() -> None:
    comparison = compare(RUNS)
    icr, ours = comparison.pairings
    assert (icr.challenger, icr.baseline, icr.wins, icr.losses, icr.ties) == ("icr", "bm25", 1, 1, 1)
    assert ours.difference == pytest.approx((0.4 + 0.2 + 0.4) / 3)
    assert [icr.p_holm, ours.p_holm] == holm([icr.p_value, ours.p_value])


def test_all_pairs_tests_every_pair_once() -> None:
    assert [(row.baseline, row.challenger) for row in compare(RUNS, baseline="all").pairings] == [
        ("bm25", "icr"),
        ("bm25", "ours"),
        ("icr", "ours"),
    ]


def test_runs_that_skip_different_queries_are_paired_on_the_shared_ones() -> None:
    pairing = compare({"a": evaluation({"1": 0.0, "2": 0.5}), "b": evaluation({"2": 0.75, "3": 1.0})}).pairings[0]
    assert (pairing.difference, pairing.wins) == (pytest.approx(0.25), 1)


def test_unknown_baseline_lists_the_runs() -> None:
    with pytest.raises(InputError, match="'x' is not one of the runs: bm25, icr, ours"):
        compare(RUNS, baseline="x")


def test_rendering_multiplies_by_hundred_and_escapes_markdown() -> None:
    comparison = compare({"a|b": RUNS["bm25"], "ours": RUNS["ours"]}, Settings(resamples=100))
    assert "40.00 [20.00, 50.00]" in render(comparison, "text")
    markdown = render(comparison, "markdown")
    assert "| a\\|b | 40.00 [20.00, 50.00] | 3 |" in markdown
    assert "+33.33" in markdown
