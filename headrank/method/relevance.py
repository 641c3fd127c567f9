"""From a score to the chance that a passage is relevant: a monotone curve fitted on judged lists. Pure numpy.

What such a number means: among candidates like those of the fit (same model, same kind of first stage, queries and
judgements), of the passages with relevance 0.7 about seven in ten were judged relevant. It never changes an order. A
score of the late layout depends on query and passage alone, and so does its relevance; a mass of the other layouts is
relative to its list, and there the number holds for lists of the fit's length only.

Shapes: N scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headrank.errors import InputError

KINDS = ("platt", "isotonic")
_STEPS, _TOLERANCE = 100, 1e-10
_SMALLEST = 1e-4  # no curve promises more certainty than this


@dataclass(frozen=True)
class RelevanceCurve:
    """Relevance at ascending ``scores``, linear between them and constant beyond (isotonic); or a sigmoid (platt).

    ``fit`` says on what it was fitted and how well it did on queries that it had not seen.
    """

    kind: Literal["platt", "isotonic"]
    slope: float = 1.0
    intercept: float = 0.0
    scores: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"relevance: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        numbers = (self.slope, self.intercept, *self.scores, *self.values)
        if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
            raise InputError("relevance: slope, intercept, scores and values must be finite numbers")
        if self.kind == "platt" and self.slope < 0:
            raise InputError(f"relevance: slope {self.slope} would turn the order around; it must be at least 0")
        if self.kind == "isotonic":
            is_rising = all(low < high for low, high in zip(self.scores, self.scores[1:], strict=False))
            is_monotone = all(low <= high for low, high in zip(self.values, self.values[1:], strict=False))
            if not self.scores or len(self.scores) != len(self.values) or not is_rising or not is_monotone:
                raise InputError("relevance: an isotonic curve needs as many rising scores as values that do not fall")
        if not all(0 <= value <= 1 for value in self.values):
            raise InputError("relevance: values must be from 0 to 1")

    def of(self, scores_N: np.ndarray) -> np.ndarray:
        """Relevance float64 [N] in [0, 1]; it rises with the score, or stays."""
        scores_N = np.asarray(scores_N, np.float64)
        if self.kind == "platt":
            return _sigmoid(self.slope * scores_N + self.intercept)
        return np.interp(scores_N, self.scores, self.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for headrank.json."""
        shape: dict[str, Any] = {"slope": self.slope, "intercept": self.intercept}
        if self.kind == "isotonic":
            shape = {"scores": list(self.scores), "values": list(self.values)}
        return {"kind": self.kind, **shape, "fit": dict(self.fit)}

    @classmethod
    def from_dict(cls, values: Any) -> RelevanceCurve:
        """The inverse of ``to_dict``, checked."""
        if not isinstance(values, Mapping) or not isinstance(values.get("fit", {}), Mapping):
            raise InputError(f"relevance: expected an object with 'kind' and 'fit', found {str(values)[:60]!r}")
        unknown = sorted(set(values) - {"kind", "slope", "intercept", "scores", "values", "fit"})
        if unknown:
            raise InputError(f"relevance: unknown field {unknown[0]!r}; was this file written by a newer headrank?")
        known = {"kind": None, **values}
        for name in ("scores", "values"):
            if not isinstance(known.get(name, ()), Sequence):
                raise InputError(f"relevance: {name!r} must be a list of numbers")
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def _sigmoid(logits_N: np.ndarray) -> np.ndarray:
    # tanh saturates where exp(-logit) would overflow
    return 0.5 * (1.0 + np.tanh(0.5 * logits_N))


def fit_platt(scores_N: np.ndarray, is_relevant_N: np.ndarray) -> RelevanceCurve:
    """sigmoid(a s + b) by maximum likelihood on Platt's smoothed labels, so that separable data keep a finite slope.

    Newton's method on standardised scores. A slope that would come out negative is 0: the order is the reranker's to
    decide.
    """
    scores_N, positive = _checked(scores_N, is_relevant_N)
    num_relevant, num_other = int(positive.sum()), int((~positive).sum())
    # Platt's targets: with 0 and 1 a separable set of judgements drives the slope to infinity
    targets_N = np.where(positive, (num_relevant + 1) / (num_relevant + 2), 1 / (num_other + 2))
    centre, spread = float(scores_N.mean()), float(scores_N.std()) or 1.0
    inputs_N2 = np.stack([(scores_N - centre) / spread, np.ones_like(scores_N)], axis=1)
    weights_2 = np.array([0.0, math.log((num_relevant + 1) / (num_other + 1))])
    for _ in range(_STEPS):
        chances_N = _sigmoid(inputs_N2 @ weights_2)
        gradient_2 = inputs_N2.T @ (chances_N - targets_N)
        # the small diagonal keeps Newton's step finite when all scores are equal
        curvature_22 = (inputs_N2 * (chances_N * (1 - chances_N))[:, None]).T @ inputs_N2 + 1e-9 * np.eye(2)
        step_2 = np.linalg.solve(curvature_22, gradient_2)
        weights_2 = weights_2 - step_2
        if float(np.abs(step_2).max()) < _TOLERANCE:
            break
    if weights_2[0] < 0:
        return RelevanceCurve("platt", 0.0, math.log((num_relevant + 1) / (num_other + 1)))
    slope = float(weights_2[0]) / spread
    return RelevanceCurve("platt", slope, float(weights_2[1]) - slope * centre)


def fit_isotonic(scores_N: np.ndarray, is_relevant_N: np.ndarray) -> RelevanceCurve:
    """The rising step function of least squares (pool adjacent violators), with a knot at the middle of every step."""
    scores_N, positive = _checked(scores_N, is_relevant_N)
    order = np.argsort(scores_N, kind="stable")
    blocks: list[tuple[float, float, float]] = []  # (sum of labels, sum of scores, number)
    for score, label in zip(scores_N[order], positive[order].astype(float), strict=True):
        blocks.append((label, float(score), 1.0))
        while len(blocks) > 1 and (
            blocks[-2][0] / blocks[-2][2] >= blocks[-1][0] / blocks[-1][2] or _is_same_score(blocks)
        ):
            last = blocks.pop()
            joined = tuple(one + other for one, other in zip(blocks[-1], last, strict=True))
            blocks[-1] = joined  # type: ignore[assignment]
    # never exactly 0 or 1: one judgement more would make the log loss infinite
    knots = {
        total / count: float(min(1 - _SMALLEST, max(_SMALLEST, labels / count))) for labels, total, count in blocks
    }
    return RelevanceCurve("isotonic", scores=tuple(knots), values=tuple(knots.values()))


def _is_same_score(blocks: Sequence[tuple[float, float, float]]) -> bool:
    """Equal scores have one relevance."""
    return blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]


def _checked(scores_N: np.ndarray, is_relevant_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores_N, positive = np.asarray(scores_N, np.float64), np.asarray(is_relevant_N, bool)
    if positive.all() or not positive.any():
        raise InputError(
            f"relevance: {int(positive.sum())} of {len(positive)} judged candidates are relevant; both kinds are needed"
        )
    return scores_N, positive


def quality(relevance_N: np.ndarray, is_relevant_N: np.ndarray, num_bins: int = 10) -> dict[str, float]:
    """How good numbers in [0, 1] are: log loss and Brier score (both beside the base rate's), AUC, expected
    calibration error.
    """
    positive = np.asarray(is_relevant_N, bool)
    chances = np.clip(np.asarray(relevance_N, np.float64), _SMALLEST, 1 - _SMALLEST)
    base = float(np.clip(positive.mean(), _SMALLEST, 1 - _SMALLEST))
    order = np.argsort(chances, kind="stable")
    bins = [part for part in np.array_split(order, num_bins) if len(part)]
    error = sum(len(part) * abs(float(chances[part].mean()) - float(positive[part].mean())) for part in bins) / len(
        positive
    )
    return {
        "log_loss": float(-np.where(positive, np.log(chances), np.log1p(-chances)).mean()),
        "log_loss_of_base_rate": -(base * math.log(base) + (1 - base) * math.log1p(-base)),
        "brier": float(np.square(chances - positive).mean()),
        "brier_of_base_rate": base * (1 - base),
        "auc": area_under_curve(chances, positive),
        "calibration_error": float(error),
    }


def area_under_curve(scores_N: np.ndarray, is_relevant_N: np.ndarray) -> float:
    """The chance that a relevant passage has more than another one, ties counted half; 0.5 where one kind is
    missing.
    """
    positive = np.asarray(is_relevant_N, bool)
    num_relevant, num_other = int(positive.sum()), int((~positive).sum())
    if not num_relevant or not num_other:
        return 0.5
    _, inverse, counts = np.unique(np.asarray(scores_N), return_inverse=True, return_counts=True)
    # mean rank of equal scores: ties count half
    middle = np.cumsum(counts) - (counts - 1) / 2.0
    ranks = middle[inverse]
    return float((ranks[positive].sum() - num_relevant * (num_relevant + 1) / 2) / (num_relevant * num_other))
