"""The fit of a readout: pairwise logistic regression on head values, with L2, and a group lasso that chooses key-value
groups.

Everything is convex and starts at zero, so the same lists give the same weights. A query's pairs are averaged before
queries are: one with many pairs does not count more.

Shapes: N passages of a list, M passages of all lists, P pairs of all lists, K heads, R query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from headrank.selection.readout_lists import ReadoutList

LEAST_MARGIN = 1.0  # logits: a teacher that is less sure of two passages says nothing about them
_STEPS, _TOLERANCE = 500, 1e-6


def log_mass_values(ratios_NKR: np.ndarray, offsets_K: np.ndarray, floor: float) -> np.ndarray:
    """s_h of every passage before the weights, float32 [N, K]: the mean over rows of log(exp(ratio - c_h) + floor)."""
    values = ratios_NKR.astype(np.float32) - offsets_K.astype(np.float32)[:, None]
    if floor > 0:
        values = np.logaddexp(values, np.float32(np.log(floor)))
    return values.mean(-1)


def median_offsets(ratios: Sequence[np.ndarray], num_heads: int) -> np.ndarray:
    """c_h: each head's median ratio over all passages and rows of the training lists, float64 [K]."""
    pooled = np.concatenate(
        [values[:, :num_heads].transpose(1, 0, 2).reshape(num_heads, -1) for values in ratios], axis=1
    )
    return np.median(pooled.astype(np.float32), axis=1).astype(np.float64)


@dataclass(frozen=True)
class Pairs:
    """Preferences within lists: passage ``first`` is the better one with probability ``target``; ``weight`` sums to
    1 over all.
    """

    first_P: np.ndarray
    second_P: np.ndarray
    target_P: np.ndarray
    weight_P: np.ndarray


def list_pairs(one: ReadoutList, labels: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(first, second, target, weight) of one list, weights summing to 1; none where no pair says anything.

    ``labels`` is judged (every pair of different grades), teacher (soft labels sigma(t_i - t_j)), or both, half each.
    """
    parts = []
    if labels in ("judged", "both"):
        grades = np.array([np.nan if grade is None else grade for grade in one.grades])
        first, second = np.nonzero(grades[:, None] > grades[None, :])
        parts.append((first, second, np.ones(len(first))))
    if labels in ("teacher", "both") and one.teacher is not None:
        scores = np.array(one.teacher)
        margins = scores[:, None] - scores[None, :]
        first, second = np.nonzero(margins >= LEAST_MARGIN)
        parts.append((first, second, 1 / (1 + np.exp(-margins[first, second]))))
    parts = [part for part in parts if len(part[0])]
    # every list counts once: by pairs, a list of 40 graded passages would outweigh sixteen lists of 10
    weights = [np.full(len(part[0]), 1 / (len(parts) * len(part[0]))) for part in parts]
    if not parts:
        return (np.zeros(0, int),) * 2 + (np.zeros(0),) * 2  # type: ignore[return-value]
    first, second, target = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return first, second, target, np.concatenate(weights)


class Problem:
    """The mean pairwise logistic loss of weights over the lists' head values, and its gradient."""

    def __init__(self, lists: Sequence[ReadoutList], values: Sequence[np.ndarray], labels: str) -> None:
        """``values`` are the head values [N, K] of each list. Features are scaled by their deviation within lists."""
        columns: list[list[np.ndarray]] = [[], [], [], []]
        used, start = [], 0
        for one, values_NK in zip(lists, values, strict=True):
            first, second, target, weight = list_pairs(one, labels)
            if len(first):
                for column, part in zip(columns, (first + start, second + start, target, weight), strict=True):
                    column.append(part)
                # centred per list: what shifts a whole list says nothing about its order and would only widen the
                # deviation that features are scaled by
                used.append(values_NK - values_NK.mean(0))
                start += len(values_NK)
        self.num_lists = len(used)
        self.num_features = values[0].shape[1] if values else 0
        centred = np.concatenate(used).astype(np.float64) if used else np.zeros((0, self.num_features))
        spread = centred.std(0) if used else np.ones(self.num_features)
        # a head that never varies keeps its zeros; divided by its rounding noise it would become the largest feature
        self.scale_K = np.where(spread > 1e-9, spread, 1.0)
        self.features_MK = centred / self.scale_K
        first, second, target, weight = (np.concatenate(column) if column else np.zeros(0) for column in columns)
        self.pairs = Pairs(first.astype(int), second.astype(int), target, weight / max(1, self.num_lists))

    def loss(self, scaled_K: np.ndarray, features_MK: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Loss and gradient for weights of scaled features; ``features_MK`` are those columns only that the weights
        belong to.
        """
        features = self.features_MK if features_MK is None else features_MK
        pairs, scores_M = self.pairs, features @ scaled_K
        margin_P = scores_M[pairs.first_P] - scores_M[pairs.second_P]
        # log(1 + e^m) - t m is the cross entropy with a soft target, without a logarithm of 0
        loss = float(pairs.weight_P @ (np.logaddexp(0, margin_P) - pairs.target_P * margin_P))
        slope_P = pairs.weight_P * (1 / (1 + np.exp(-margin_P)) - pairs.target_P)
        size = len(scores_M)
        # bincount adds repeated indices; slope_M[first_P] += ... would keep only the last pair of each passage
        slope_M = np.bincount(pairs.first_P, slope_P, size) - np.bincount(pairs.second_P, slope_P, size)
        return loss, features.T @ slope_M

    def accuracy(self, scaled_K: np.ndarray) -> float:
        """The share of pairs, averaged over queries, in which the more probable passage scores higher."""
        scores_M = self.features_MK @ scaled_K
        return float(self.pairs.weight_P @ (scores_M[self.pairs.first_P] > scores_M[self.pairs.second_P]))


def fit_ridge(problem: Problem, l2: float, chosen: np.ndarray | None = None) -> np.ndarray:
    """Weights [K] of scaled features that minimise loss + l2/2 |w|^2; features outside ``chosen`` (indices) get 0."""
    columns = np.arange(problem.num_features) if chosen is None else chosen
    features_MK = problem.features_MK if chosen is None else np.ascontiguousarray(problem.features_MK[:, chosen])

    def objective(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = problem.loss(scaled, features_MK)
        return loss + l2 / 2 * float(scaled @ scaled), gradient + l2 * scaled

    found = minimize(
        objective, np.zeros(len(columns)), jac=True, method="L-BFGS-B", options={"maxiter": _STEPS, "gtol": _TOLERANCE}
    )
    weights_K = np.zeros(problem.num_features)
    weights_K[columns] = found.x
    return weights_K


def fit_group_lasso(
    problem: Problem, groups: Sequence[np.ndarray], penalty: float, l2: float, start_K: np.ndarray
) -> np.ndarray:
    """Weights [K] minimising loss + l2/2 |w|^2 + penalty * sum_g sqrt(|g|) |w_g|, by accelerated proximal gradient
    steps.

    Features outside all groups stay 0. ``start_K`` is where to begin (a neighbouring penalty's solution).
    """

    def smooth(weights_K: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = problem.loss(weights_K)
        return loss + l2 / 2 * float(weights_K @ weights_K), gradient + l2 * weights_K

    def shrunk(weights_K: np.ndarray, step: float) -> np.ndarray:
        result = np.zeros_like(weights_K)
        for group in groups:
            norm = float(np.linalg.norm(weights_K[group]))
            # by the group's size, or groups of many heads would be let in first
            least = step * penalty * len(group) ** 0.5
            if norm > least:
                result[group] = weights_K[group] * (1 - least / norm)
        return result

    return _accelerated(smooth, shrunk, start_K)


def _accelerated(
    smooth: Callable[[np.ndarray], tuple[float, np.ndarray]],
    shrunk: Callable[[np.ndarray, float], np.ndarray],
    start_K: np.ndarray,
) -> np.ndarray:
    """FISTA with backtracking and a restart whenever the momentum points uphill."""
    weights_K, ahead_K, momentum, step = start_K, start_K, 1.0, 1.0
    for _ in range(_STEPS):
        value, gradient = smooth(ahead_K)
        while True:
            next_K = shrunk(ahead_K - step * gradient, step)
            move = next_K - ahead_K
            if smooth(next_K)[0] <= value + gradient @ move + move @ move / (2 * step) + 1e-12:
                break
            step /= 2
        change = next_K - weights_K
        if np.abs(change).max() < _TOLERANCE * 10:
            return next_K
        if (ahead_K - next_K) @ change > 0:
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        weights_K, ahead_K, momentum = next_K, next_K + (momentum - 1) / following * change, following
        # backtracking only shrinks: without growth one steep region would slow down all steps after it
        step *= 1.25
    return weights_K


def choose_groups(problem: Problem, groups: Sequence[np.ndarray], budget: int, l2: float) -> list[int]:
    """At most ``budget`` groups (their indices): the penalty falls until the group lasso keeps so many.

    Where one step of the penalty lets in more than the budget, those with the largest weights stay.
    """
    if budget >= len(groups):
        return list(range(len(groups)))
    gradient = problem.loss(np.zeros(problem.num_features))[1]
    penalty = max(float(np.linalg.norm(gradient[group])) / len(group) ** 0.5 for group in groups)
    weights_K, norms = np.zeros(problem.num_features), np.zeros(len(groups))
    for _ in range(60):
        # each solution starts the next one: from zero every penalty would take its hundreds of steps again
        penalty *= 0.8
        weights_K = fit_group_lasso(problem, groups, penalty, l2, weights_K)
        norms = np.array([np.linalg.norm(weights_K[group]) for group in groups])
        if (norms > 0).sum() >= budget:
            break
    ranked = sorted(range(len(groups)), key=lambda index: (-norms[index], index))
    return sorted(index for index in ranked[:budget] if norms[index] > 0)
