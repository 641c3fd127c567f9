"""The log-mass score: against Python loops, by hand, and what must hold for any numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout, mean_over_rows, row_values, segment_log_sums, weighted_sum

TOLERANCE = 1e-5  # float32 against Python's float64


def slow_head_value(
    logits_RS: list[list[float]], passage: list[int], opening: list[int], offset: float, floor: float
) -> float:
    """mean over rows of log(exp(lse_passage - lse_opening - c) + f) with one exponential at a time."""
    total = 0.0
    for row in logits_RS:
        mass = math.fsum(math.exp(row[token]) for token in passage)
        base = math.fsum(math.exp(row[token]) for token in opening)
        total += math.log(mass / base * math.exp(-offset) + floor)
    return total / len(logits_RS)


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_head_values_equal_a_loop_over_rows_and_tokens(floor: float) -> None:
    torch.manual_seed(0)
    logits_BKRS = torch.randn(2, 3, 4, 12) * 3
    # segment 2 is the opening
    owner_BS = torch.tensor([[2, 2, 0, 0, 0, 1, 1, 3, 3, 3, 3, 3], [2, 0, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3]])
    offsets_K = torch.tensor([0.5, -1.0, 2.0])
    sums_BNKR = segment_log_sums(logits_BKRS, owner_BS, 3)
    values_BNK = mean_over_rows(row_values(sums_BNKR[:, :2], sums_BNKR[:, 2], offsets_K, floor))
    for batch in range(2):
        segments = [[token for token in range(12) if owner_BS[batch, token] == segment] for segment in range(3)]
        for passage in range(2):
            for head in range(3):
                rows = logits_BKRS[batch, head].tolist()
                expected = slow_head_value(rows, segments[passage], segments[2], float(offsets_K[head]), floor)
                assert float(values_BNK[batch, passage, head]) == pytest.approx(expected, abs=TOLERANCE)


def test_a_hand_computed_score() -> None:
    """One head, one row: masses e^0 + e^0 = 2 on the passage and 1 on the opening; log(2/1 + 0.5) = log 2.5, times
    weight 3.
    """
    sums_BNKR = segment_log_sums(torch.zeros(1, 1, 1, 3), torch.tensor([[1, 0, 0]]), 2)
    values_BNK = mean_over_rows(row_values(sums_BNKR[:, :1], sums_BNKR[:, 1], floor=0.5))
    assert float(weighted_sum(values_BNK, torch.tensor([3.0]))) == pytest.approx(3 * math.log(2.5))


def test_masses_that_underflow_keep_their_logarithm() -> None:
    logits = torch.tensor([[[[0.0, -500.0, -501.0]]]])
    sums_BNKR = segment_log_sums(logits, torch.tensor([[2, 0, 1]]), 3)
    assert torch.softmax(logits, -1)[0, 0, 0, 1] == 0.0, "as a mass it is gone"
    assert torch.allclose(sums_BNKR[0, :, 0, 0], torch.tensor([-500.0, -501.0, 0.0]))


def test_a_segment_without_tokens_is_minus_infinity_and_poisons_no_gradient() -> None:
    logits = torch.randn(1, 2, 3, 4, requires_grad=True)
    sums_BNKR = segment_log_sums(logits, torch.tensor([[0, 0, 2, 2]]), 3)
    assert torch.isneginf(sums_BNKR[0, 1]).all()
    sums_BNKR[0, [0, 2]].sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(-50, 50), st.sampled_from([0.0, 0.1, 0.3]))
def test_what_all_logits_of_a_row_share_changes_no_value(seed: int, shift: float, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, owner_BS = torch.randn(1, 2, 3, 8, generator=generator), torch.tensor([[2, 2, 0, 0, 0, 1, 1, 3]])

    def values(logits: torch.Tensor) -> torch.Tensor:
        sums_BNKR = segment_log_sums(logits, owner_BS, 3)
        return mean_over_rows(row_values(sums_BNKR[:, :2], sums_BNKR[:, 2], floor=floor))

    assert torch.allclose(values(logits), values(logits + shift), atol=1e-4)


def test_the_floor_forgives_one_missing_word_and_its_gradient_is_that_of_autograd() -> None:
    # passages answer one row well and one not at all; both rows a little
    ratios = torch.tensor([[[[0.0, -9.0]]], [[[-1.0, -1.0]]]])
    opening = torch.zeros(2, 1, 2)
    strict, floored = (mean_over_rows(row_values(ratios, opening, floor=floor))[:, 0, 0] for floor in (0.0, 0.1))
    assert strict[0] < strict[1] and floored[0] < floored[1] and floored[1] - floored[0] < 0.3 * (strict[1] - strict[0])
    values = torch.randn(1, 2, 2, 3, dtype=torch.float32, requires_grad=True)
    loss = row_values(values, torch.zeros(1, 2, 3), floor=0.3).sum()
    loss.backward()
    assert values.grad is not None
    assert torch.allclose(values.grad, values.detach().exp() / (values.detach().exp() + 0.3), atol=TOLERANCE)


def test_padded_rows_count_nothing_even_where_they_are_not_finite() -> None:
    values = torch.tensor([[[[1.0, 3.0, float("nan")]]]])
    assert float(mean_over_rows(values, torch.tensor([[0.5, 0.5, 0.0]]))) == 2.0


def test_weighting_stays_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    values, weights = torch.randn(1, 5, 270) * 20, torch.randn(270)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = weighted_sum(values, weights)
    assert scores.dtype == torch.float32 and torch.equal(scores, weighted_sum(values, weights))
    assert torch.allclose(scores.double(), (values.double() * weights.double()).sum(-1), atol=1e-3)


LATE = PromptTemplate(document_layout="late")
READOUT = Readout(weights=(0.5, -1.25), floor=0.1, offsets=(-2.0, 0.25), fit={"labels": "judged"})


def test_heads_with_a_readout_come_back_from_their_file_and_an_older_headrank_refuses_it(tmp_path: Path) -> None:
    heads = HeadSet(((3, 1), (0, 2)), "readout", "tiny", 4, 4, prompt=LATE, readout=READOUT)
    heads.save(tmp_path / "heads.json")
    assert HeadSet.load(tmp_path / "heads.json") == heads
    assert json.loads((tmp_path / "heads.json").read_text())["format"] == "headrank-heads/2", (
        "an older one knows only /1"
    )


def test_heads_without_a_readout_are_written_and_read_as_before(tmp_path: Path) -> None:
    heads = HeadSet(((3, 1), (0, 2)), "entropy", "tiny", 4, 4)
    heads.save(tmp_path / "heads.json")
    values = json.loads((tmp_path / "heads.json").read_text())
    assert (
        values["format"] == "headrank-heads/1" and "readout" not in values and "branch_position" not in values["prompt"]
    )
    assert HeadSet.load(tmp_path / "heads.json") == heads


def test_prompt_hashes_of_older_layouts_stay() -> None:
    assert PromptTemplate().hash == "4176c0b1e286"
    assert PromptTemplate(document_layout="parallel").hash == "a3a0a9a96847"
    assert LATE.hash != PromptTemplate(document_layout="late", branch_position=256).hash
    assert PromptTemplate(branch_position=99).hash == PromptTemplate().hash, (
        "only the late layout has a branch position"
    )
    assert PromptTemplate.from_dict(LATE.to_dict()) == LATE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": (1.0,)}, "1 weights for 2 heads"),
        ({"offsets": (1.0,)}, "1 offsets for 2 heads"),
        ({"floor": -0.1}, "floor"),
        ({"weights": (1.0, math.nan)}, "finite"),
        ({"is_calibrated": True}, "not calibrated"),
        ({"kind": "masses"}, "'masses' is not one of"),
    ],
)
def test_a_readout_that_cannot_be_meant_is_one_line(changes: dict[str, object], said: str) -> None:
    values = {**READOUT.to_dict(), **changes}
    with pytest.raises(InputError, match=said):
        HeadSet(((3, 1), (0, 2)), "readout", "tiny", 4, 4, prompt=LATE, readout=Readout(**values))


def test_damaged_readouts_name_the_file_and_the_field(tmp_path: Path) -> None:
    heads = HeadSet(((3, 1), (0, 2)), "readout", "tiny", 4, 4, prompt=LATE, readout=READOUT).to_dict()
    damages = [
        ({"weights": ["x", 1]}, "weights"),
        ({"floor": None}, "floor"),
        ({"fit": 3}, "fit"),
        ({"bias": 1.0}, "bias"),
    ]
    for change, said in damages:
        damaged = {**heads, "readout": {**heads["readout"], **change}}
        (tmp_path / "heads.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=rf"heads\.json: .*{said}"):
            HeadSet.load(tmp_path / "heads.json")
    (tmp_path / "heads.json").write_text(json.dumps({key: value for key, value in heads.items() if key != "readout"}))
    with pytest.raises(InputError, match="readout"):
        HeadSet.load(tmp_path / "heads.json")


def test_the_late_layout_refuses_heads_that_only_know_masses() -> None:
    with pytest.raises(InputError, match="log-mass readout"):
        HeadSet(((0, 0),), "entropy", "tiny", 4, 4, prompt=LATE)
