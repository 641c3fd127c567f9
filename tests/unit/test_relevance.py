"""Curves from a score to a chance: against slow references, by hand, and monotone whatever they are fitted on."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from headrank.commands import main
from headrank.errors import InputError
from headrank.method.relevance import RelevanceCurve, area_under_curve, fit_isotonic, fit_platt, quality


def sample(seed: int = 0, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose true chance is sigmoid(2 s - 3)."""
    random = np.random.default_rng(seed)
    scores = random.normal(1.0, 1.5, count)
    return scores, random.random(count) < 1 / (1 + np.exp(3 - 2 * scores))


def test_platt_minimises_the_log_loss_of_smoothed_labels() -> None:
    scores, labels = sample()
    curve = fit_platt(scores, labels)
    high, low = (labels.sum() + 1) / (labels.sum() + 2), 1 / ((~labels).sum() + 2)
    targets = np.where(labels, high, low)

    def loss(weights: np.ndarray) -> float:
        logits = weights[0] * scores + weights[1]
        return float((np.logaddexp(0, logits) - targets * logits).sum())

    best = minimize(loss, np.zeros(2), method="BFGS").x
    assert (curve.slope, curve.intercept) == pytest.approx(tuple(best), abs=1e-4)
    assert curve.slope == pytest.approx(2, abs=0.5) and curve.intercept == pytest.approx(-3, abs=0.7)


def test_separable_labels_have_a_finite_slope_and_reversed_ones_none() -> None:
    scores = np.array([0.0, 1.0, 2.0, 3.0])
    assert 0 < fit_platt(scores, scores > 1.5).slope < 100
    reversed_ = fit_platt(scores, scores < 1.5)
    assert reversed_.slope == 0 and reversed_.of(scores).tolist() == [0.5] * 4


def test_isotonic_by_hand() -> None:
    """Labels 0 1 | 1 0 0 1 | 1: the violators 1 1 0 0 pool to a half."""
    curve = fit_isotonic(np.arange(7.0), np.array([0, 1, 1, 0, 0, 1, 1], bool))
    assert curve.scores == (0.0, 2.5, 5.5) and curve.values == (1e-4, 0.5, 1 - 1e-4)
    assert curve.of(np.array([-9.0, 2.5, 4.0, 9.0])) == pytest.approx([1e-4, 0.5, 0.5 + 0.5 * (0.5 - 1e-4), 1 - 1e-4])


def test_isotonic_is_the_best_rising_step_function() -> None:
    labels = np.array([0, 1, 0, 0, 1, 1], bool)
    curve = fit_isotonic(np.arange(6.0), labels)
    blocks = [(0,), (1, 2, 3), (4, 5)]
    assert [round(value, 3) for value in curve.values] == [0.0, 0.333, 1.0]
    fitted = [value for value, block in zip(curve.values, blocks, strict=True) for _ in block]
    grid = [0.0, 1 / 3, 0.5, 2 / 3, 1.0]
    least = min(
        sum((v - y) ** 2 for v, y in zip(c, labels, strict=True))
        for c in itertools.combinations_with_replacement(grid, 6)
    )
    assert sum((v - y) ** 2 for v, y in zip(fitted, labels, strict=True)) == pytest.approx(least, abs=1e-3)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=40),
    st.sampled_from([fit_platt, fit_isotonic]),
)
def test_curves_never_fall_and_stay_within_zero_and_one(rows: list[tuple[int, bool]], fit: object) -> None:
    scores, labels = np.array([score for score, _ in rows], float), np.array([label for _, label in rows])
    if labels.all() or not labels.any():
        with pytest.raises(InputError, match="both kinds are needed"):
            fit(scores, labels)
        return
    values = fit(scores, labels).of(np.linspace(-9, 9, 50))
    assert (np.diff(values) >= -1e-12).all() and (values >= 0).all() and (values <= 1).all()


def test_auc_equals_a_loop_over_pairs() -> None:
    scores, labels = np.round(sample(3, 60)[0]), sample(3, 60)[1]
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert area_under_curve(scores, labels) == pytest.approx(sum(pairs) / len(pairs))


def test_quality_by_hand() -> None:
    found = quality(np.array([0.8, 0.2]), np.array([True, False]), num_bins=1)
    assert found["log_loss"] == pytest.approx(-math.log(0.8)) and found["brier"] == pytest.approx(0.04)
    assert (
        found["brier_of_base_rate"] == 0.25 and found["auc"] == 1.0 and found["calibration_error"] == pytest.approx(0.0)
    )


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_a_curve_survives_json(fit: object) -> None:
    curve = fit(*sample())
    assert RelevanceCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "expected an object"),
        ({"kind": "spline"}, "not one of platt, isotonic"),
        ({"kind": "platt", "slope": "1"}, "finite numbers"),
        ({"kind": "platt", "slope": -1.0}, "turn the order around"),
        ({"kind": "isotonic", "scores": [1.0], "values": [2.0]}, "from 0 to 1"),
        ({"kind": "isotonic", "scores": [1.0, 0.0], "values": [0.1, 0.2]}, "rising scores"),
        ({"kind": "platt", "knots": []}, "unknown field 'knots'"),
    ],
)
def test_a_broken_curve_is_refused(values: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        RelevanceCurve.from_dict(values)


def test_the_command_fits_on_judged_candidates_and_reports_unseen_queries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores, labels = sample(1, 200)
    lines, qrels = [], []
    for query in range(10):
        ids = [f"d{index}" for index in range(20)]
        part = slice(20 * query, 20 * query + 20)
        lines.append(
            json.dumps(
                {"query_id": f"q{query}", "doc_ids": ids, "scores": scores[part].tolist(), "ranks": list(range(1, 21))}
            )
        )
        qrels += [f"q{query} 0 {doc} {2 * int(label)}" for doc, label in list(zip(ids, labels[part], strict=True))[:15]]
    (tmp_path / "scores.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "qrels.txt").write_text("\n".join(qrels) + "\n")
    call = ["fit-relevance", "--scores", str(tmp_path / "scores.jsonl"), "--qrels", str(tmp_path / "qrels.txt")]
    assert main([*call, "--relevant-from", "2", "--output", str(tmp_path / "curve.json")]) == 0
    curve = RelevanceCurve.from_dict(json.loads((tmp_path / "curve.json").read_text()))
    judged = np.concatenate([np.arange(20 * query, 20 * query + 15) for query in range(10)])
    assert curve.slope == pytest.approx(fit_platt(scores[judged], labels[judged]).slope)
    assert curve.fit["judged"] == 150 and curve.fit["unseen"]["auc"] > 0.8
    assert "AUC" in capsys.readouterr().err
    assert main([*call, "--unjudged-as-other", "--kind", "isotonic", "--output", str(tmp_path / "other.json")]) == 0
    assert RelevanceCurve.from_dict(json.loads((tmp_path / "other.json").read_text())).fit["judged"] == 200
    model = tmp_path / "model"
    model.mkdir()
    (model / "headrank.json").write_text(json.dumps({"format": "headrank/1", "heads": {"kept": True}}))
    assert main([*call, "--model", str(model)]) == 0
    about = json.loads((model / "headrank.json").read_text())
    assert about["heads"] == {"kept": True} and RelevanceCurve.from_dict(about["relevance"]).fit["judged"] == 150
    assert "headrank.json: platt" in capsys.readouterr().err
    assert main([*call, "--model", str(tmp_path)]) == 2 and "has no headrank.json" in capsys.readouterr().err
    assert main(call) == 2 and "give --output FILE, or --model DIR" in capsys.readouterr().err
    assert main([*call, "--relevant-from", "3", "--output", str(tmp_path / "no.json")]) == 2
    assert "both kinds are needed" in capsys.readouterr().err and not (tmp_path / "no.json").exists()
