"""Eq. 1 masses, calibration and entropy: hand-computed, against loops, and by property."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrank.method.scores import (
    calibrated_scores,
    core_head_scores,
    entropy,
    kept_tokens,
    scores_per_head,
    sum_over_documents,
    sum_over_heads,
)
from tests.slow_reference import slow_calibrated, slow_masses

TOLERANCE = 1e-6


def test_masses_sum_each_documents_tokens_and_drop_the_rest() -> None:
    owner = torch.tensor([[2, 0, 0, 2, 1]])  # two documents; 2 means no document
    rows = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25]])
    assert torch.allclose(sum_over_documents(rows, owner, 2), torch.tensor([[0.5, 0.25]]))


def test_calibration_on_a_hand_computed_document() -> None:
    # differences 0.10 x 9 and -1.0: mean -0.01, std 0.348; floor -0.706, so the outlier goes and 0.9 stays
    query, calibration = torch.full((1, 10), 0.2), torch.full((1, 10), 0.1)
    calibration[0, 9] = 1.2
    owner = torch.zeros(1, 10, dtype=torch.long)
    assert torch.allclose(calibrated_scores(query, calibration, owner, 1), torch.tensor([[0.9]]))


def test_a_one_token_document_keeps_its_token_and_equal_tokens_are_all_kept() -> None:
    owner = torch.tensor([[0, 1, 1, 1]])
    query, calibration = torch.tensor([[0.0, 0.3, 0.3, 0.3]]), torch.tensor([[0.5, 0.1, 0.1, 0.1]])
    assert torch.allclose(calibrated_scores(query, calibration, owner, 2), torch.tensor([[-0.5, 0.6]]))


def test_both_branches_carry_gradient_and_the_mask_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.rand(1, 12, generator=generator).requires_grad_()
    calibration = torch.rand(1, 12, generator=generator).requires_grad_()
    owner = torch.arange(12)[None] // 6
    calibrated_scores(query, calibration, owner, 2).sum().backward()
    keep = kept_tokens(query - calibration, owner, 2)
    assert torch.equal(query.grad, keep.float()) and torch.equal(calibration.grad, -keep.float())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**16))
def test_any_list_equals_the_python_loops(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spans, position = [], 1
    for length in lengths:
        spans.append((position, position + length))
        position += length + 1
    owner = torch.full((1, position), len(lengths))
    for index, (start, end) in enumerate(spans):
        owner[0, start:end] = index
    query, calibration = (torch.rand(1, 3, position, generator=generator, dtype=torch.float64) for _ in range(2))
    masses = sum_over_documents(query, owner, len(lengths))
    scores = calibrated_scores(query, calibration, owner, len(lengths))
    for head in range(3):
        rows, other = query[0, head].tolist(), calibration[0, head].tolist()
        assert torch.allclose(
            masses[0, head], torch.tensor(slow_masses(rows, spans), dtype=torch.float64), atol=TOLERANCE
        )
        assert torch.allclose(
            scores[0, head], torch.tensor(slow_calibrated(rows, other, spans), dtype=torch.float64), atol=TOLERANCE
        )


def test_entropy_is_zero_for_one_token_and_log_n_for_uniform() -> None:
    assert float(entropy(torch.tensor([0.0, 1.0, 0.0]))) == 0.0
    assert math.isclose(float(entropy(torch.full((8,), 0.125))), math.log(8), rel_tol=1e-6)
    assert math.isclose(float(entropy(torch.tensor([0.5, 0.25, 0.25]))), 1.5 * math.log(2), rel_tol=1e-6)


def _two_layers(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], SimpleNamespace]:
    """Rows of two layers with 3 and 1 heads, and the layout of three documents in 20 tokens."""
    generator = torch.Generator().manual_seed(seed)
    query, calibration = ([torch.rand(2, heads, 20, generator=generator) for heads in (3, 1)] for _ in range(2))
    owner = torch.full((2, 20), 3)
    for index, (start, end) in enumerate([(1, 4), (5, 13), (14, 15)]):
        owner[:, start:end] = index
    return query, calibration, SimpleNamespace(document_of_token_BS=owner, num_documents=3)


def test_the_score_of_core_heads_equals_the_python_loops_over_their_sum() -> None:
    query, calibration, layout = _two_layers()
    found = core_head_scores(query, calibration, layout)
    for batch in range(2):
        both = [
            [sum(float(head[token]) for rows in branch for head in rows[batch]) for token in range(20)]
            for branch in (query, calibration)
        ]
        expected = slow_calibrated(both[0], both[1], [(1, 4), (5, 13), (14, 15)])
        assert torch.allclose(found[batch], torch.tensor(expected), atol=TOLERANCE)
    raw = core_head_scores(query, None, layout)
    assert torch.allclose(raw[:, 2], query[0][..., 14].sum(1) + query[1][..., 14].sum(1), atol=TOLERANCE)


def test_a_reduction_over_shards_of_the_heads_gives_the_score_of_all_heads() -> None:
    query, calibration, layout = _two_layers(1)
    whole = core_head_scores(query, calibration, layout)
    shards = [
        ([rows[:, part] for rows in query[:1]], [rows[:, part] for rows in calibration[:1]])
        for part in (slice(0, 1), slice(1, 3))
    ]
    shards.append((query[1:], calibration[1:]))
    parts = [sum_over_heads(shard[0]) - sum_over_heads(shard[1]) for shard in shards]
    seen: list[torch.Tensor] = []

    def over_ranks(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return sum(parts) if len(seen) % 2 else values  # type: ignore[return-value]

    total = sum(core_head_scores(*shard, layout, over_ranks) for shard in shards)
    assert torch.allclose(total, whole, atol=TOLERANCE)
    assert [values.shape for values in seen[:2]] == [(2, 20), (2, 3)] and not seen[0].requires_grad


def test_the_scores_of_single_heads_add_up_to_the_score() -> None:
    query, calibration, layout = _two_layers(2)
    values, kept, per_head = scores_per_head(query, calibration, layout)
    assert values.shape == (2, 4, 20) and kept.shape == (2, 20) and per_head.shape == (2, 4, 3)
    assert torch.allclose(per_head.sum(1), core_head_scores(query, calibration, layout), atol=TOLERANCE)
