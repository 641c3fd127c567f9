"""The paper's analyses on hand-made lists: middle zone, promotion, score by position, head depth, Pareto frontier."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrank.errors import InputError
from headrank.evaluation.homogenisation import (
    mean_middle_zone_std,
    middle_zone,
    middle_zone_std,
    normalise_scores,
    score_by_position,
)
from headrank.evaluation.promotion import Promotion, mean_rates, promotion
from headrank.evaluation.scored_lists import QueryScores, parse_scores
from headrank.method import losses
from headrank.method.heads import HeadSet
from headrank.reports.head_depth import compare_heads, describe_change, head_depth
from headrank.reports.pareto import CostPoint, pareto_frontier


def make_list(scores: list[float], grades: list[int | None] | None = None, query_id: str = "q") -> QueryScores:
    ranks = list(range(1, len(scores) + 1))
    return parse_scores(
        {
            "query_id": query_id,
            "doc_ids": [f"d{rank}" for rank in ranks],
            "scores": scores,
            "ranks": ranks,
            "grades": grades,
        },
        "test",
    )


@pytest.mark.parametrize(("length", "first", "last"), [(40, 11, 30), (20, 6, 15), (100, 26, 75), (10, 3, 7), (4, 2, 3)])
def test_middle_zone_holds_the_ranks_the_paper_names(length: int, first: int, last: int) -> None:
    zone = middle_zone(list(range(1, length + 1)))
    assert [place + 1 for place in np.flatnonzero(zone)] == list(range(first, last + 1))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60, unique=True))
def test_middle_zone_is_the_one_the_loss_uses(ranks: list[int]) -> None:
    assert np.flatnonzero(middle_zone(ranks)).tolist() == losses.middle_zone(torch.tensor(ranks)).tolist()


def test_middle_zone_std_of_a_hand_made_list() -> None:
    # min-max over the list 10..2 gives 1, 0.5, 0.25, 0; the zone of four documents is ranks 2 and 3
    assert middle_zone_std([10, 6, 4, 2], [1, 2, 3, 4]) == pytest.approx(0.125)


@given(st.floats(0.01, 100), st.floats(-5, 5))
def test_middle_zone_std_ignores_scale_and_offset(scale: float, offset: float) -> None:
    scores = np.array([3.0, 1.0, 2.0, 5.0, 4.0, 0.0, 2.5, 1.5])
    ranks = list(range(1, 9))
    assert middle_zone_std((scale * scores + offset).tolist(), ranks) == pytest.approx(
        middle_zone_std(scores.tolist(), ranks), rel=1e-6
    )


def test_a_flat_list_has_no_deviation_and_a_tiny_list_has_no_zone() -> None:
    assert middle_zone_std([1.0] * 8, list(range(1, 9))) == 0.0
    assert normalise_scores([2.0, 2.0]).tolist() == [0.0, 0.0]
    assert middle_zone_std([1.0, 2.0], [1, 2]) is None
    assert mean_middle_zone_std([make_list([1.0])]) is None


def test_promotion_counts_middle_documents_that_reach_the_top_quartile() -> None:
    # ranks 3-6 of 8 are the middle, new ranks 1 and 2 the front; d3 (relevant) and d6 (not judged) get there, d4 does
    # not
    row = make_list([0.1, 0.2, 0.9, 0.3, 0.0, 0.8, 0.4, 0.5], [3, 0, 2, 1, 0, None, 3, 3])
    counted = promotion([row])
    assert counted == Promotion(relevant=2, relevant_promoted=1, irrelevant=2, irrelevant_promoted=1)
    assert counted.selectivity_gap == pytest.approx(0.0)
    assert promotion([row], relevant_from=2) == Promotion(1, 1, 3, 1)


def test_the_retrievers_own_order_promotes_nobody() -> None:
    counted = promotion([make_list([8.0, 7, 6, 5, 4, 3, 2, 1], [1, 0] * 4)])
    assert (counted.relevant_promoted, counted.irrelevant_promoted) == (0, 0)


def test_lists_without_judgements_are_left_out_and_rates_are_then_unknown() -> None:
    counted = promotion([make_list([1.0, 2, 3, 4])])
    assert counted.relevant_rate is None
    assert counted.selectivity_gap is None
    assert mean_rates([[counted]]) is None


def test_mean_rates_give_every_benchmark_the_same_weight() -> None:
    small, large = Promotion(1, 1, 2, 1), Promotion(100, 0, 200, 20)
    assert mean_rates([[small], [large]]) == pytest.approx((0.5, 0.3, 0.2))
    assert mean_rates([[small] * 3, [large]]) == pytest.approx((0.5, 0.3, 0.2))  # three seeds are still one benchmark
    assert mean_rates([[small, large], [large]]) == pytest.approx((0.25, 0.2, 0.05))


def test_equal_scores_keep_the_retrievers_order() -> None:
    assert make_list([0.5, 0.7, 0.5]).new_ranks() == [2, 1, 3]


def test_score_by_position_averages_normalised_scores_and_splits_by_relevance() -> None:
    curve = score_by_position([make_list([4, 2, 0], [1, 0, 0]), make_list([0, 1, 2], [0, 0, 1])])
    assert curve.mean == pytest.approx([0.5, 0.5, 0.5])
    assert curve.relevant == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert curve.irrelevant == pytest.approx([0.0, 0.5, 0.0])


def test_score_by_position_follows_the_prompt_not_the_retriever() -> None:
    reversed_row = parse_scores(
        {"query_id": "q", "doc_ids": ["a", "b"], "scores": [1, 0], "ranks": [1, 2], "positions": [2, 1]}, "test"
    )
    assert score_by_position([reversed_row]).mean.tolist() == [0.0, 1.0]
    assert score_by_position([reversed_row], by="ranks").mean.tolist() == [1.0, 0.0]
    assert score_by_position([]) is None


def heads(names: str, num_layers: int = 28, num_heads: int = 16) -> HeadSet:
    pairs = tuple((int(layer[1:]), int(head[1:])) for layer, head in (name.split("-") for name in names.split()))
    return HeadSet(pairs, "headrank", "qwen3", num_layers, num_heads)


PAPER = {  # Table of the paper's appendix: before, after, shared
    "0.6B": (
        "L11-H2 L11-H3 L16-H7 L21-H9 L21-H8 L6-H7 L17-H12 L13-H14",
        "L14-H14 L11-H3 L16-H13 L11-H2 L14-H6 L13-H6 L16-H8 L16-H14",
        [2, 4],
    ),
    "1.7B": (
        "L14-H14 L11-H2 L11-H3 L13-H14 L14-H6 L16-H14 L16-H13 L19-H5",
        "L11-H2 L14-H6 L16-H8 L11-H3 L16-H7 L16-H15 L14-H15 L16-H14",
        [1, 2, 4, 8],
    ),
}


@pytest.mark.parametrize("size", PAPER)
def test_shared_heads_are_marked_as_in_the_papers_table(size: str) -> None:
    before, after, shared_ranks = PAPER[size]
    change = compare_heads(heads(before), heads(after))
    assert [rank for rank, _, _, is_shared in change.rows() if is_shared] == shared_ranks
    assert change.rows()[0][1:3] == (before.split()[0], after.split()[0])


def test_depth_bands_are_the_papers() -> None:
    change = compare_heads(heads(PAPER["0.6B"][0]), heads(PAPER["0.6B"][1]))
    before, after = head_depth(change.before), head_depth(change.after)
    assert (before.band, after.band, after.layers_used) == ((6, 21), (11, 16), 17)
    assert sum(after.counts) == 8
    assert after.counts[16] == 3
    assert describe_change(change)[1] == "Depth band: layers 6-21 before, 11-16 after."


def test_sets_of_unequal_size_leave_gaps_and_other_architectures_are_refused() -> None:
    assert compare_heads(heads("L1-H1"), heads("L2-H2 L1-H1")).rows() == [
        (1, "L1-H1", "L2-H2", False),
        (2, "", "L1-H1", True),
    ]
    with pytest.raises(InputError, match="same architecture"):
        compare_heads(heads("L1-H1"), heads("L1-H1", num_layers=36))


def test_pareto_frontier_keeps_what_nothing_beats_on_both() -> None:
    fast, good, slow, worse, twin = (
        CostPoint(*values, "m", name)
        for *values, name in [(1, 40, "fast"), (2, 60, "good"), (9, 60, "slow"), (3, 50, "worse"), (2, 60, "twin")]
    )
    assert pareto_frontier([slow, good, worse, fast, twin]) == [fast, good, twin]
    assert pareto_frontier([]) == []
