"""Is a difference between two runs more than chance: paired tests, Holm's correction, bootstrap intervals.

All tests are two-sided and paired by query. Everything random takes a seed and gives the same numbers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrank.errors import InputError

Test = Literal["randomisation", "t"]
TESTS: tuple[Test, ...] = ("randomisation", "t")
EXACT_UP_TO = 16  # queries: 65,536 sign patterns are enumerated instead of sampled
_CHUNK = 4096  # resamples drawn at a time, so that memory does not grow with their number


def paired_randomisation(
    first: Sequence[float], second: Sequence[float], *, resamples: int = 100_000, seed: int = 0
) -> float:
    """Fisher's randomisation test: how often does swapping the two runs per query give a mean difference as large?

    Exact for up to 16 queries that differ; else (hits + 1) / (resamples + 1) over random swaps. Equal runs give 1.
    """
    differences = _differences(first, second)
    # a query with equal values is the same under every swap: leaving it out halves the patterns and changes no p-value
    differences = differences[differences != 0]
    if len(differences) == 0:
        return 1.0
    observed = abs(differences.sum()) * (1 - 1e-12)  # sums in another order differ in the last digits
    if len(differences) <= EXACT_UP_TO:
        patterns = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ differences) >= observed))
    generator = np.random.default_rng(seed)
    hits, left = 0, resamples
    while left > 0:
        size = min(_CHUNK, left)
        signs = generator.integers(0, 2, size=(size, len(differences)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ differences) >= observed))
        left -= size
    # the observed assignment counts as one of the samples: without it p could be 0
    return (hits + 1) / (resamples + 1)


def paired_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Student's paired t-test. Equal runs give 1; a constant non-zero difference gives 0; one query gives 1."""
    differences = _differences(first, second)
    if not differences.any() or len(differences) < 2:
        return 1.0
    deviation = differences.std(ddof=1)
    # the statistic would be infinite
    if deviation == 0:
        return 0.0
    from scipy.special import stdtr

    statistic = abs(differences.mean()) / (deviation / np.sqrt(len(differences)))
    return float(2 * stdtr(len(differences) - 1, -statistic))


def paired_test(
    first: Sequence[float],
    second: Sequence[float],
    test: Test = "randomisation",
    *,
    resamples: int = 100_000,
    seed: int = 0,
) -> float:
    """The p-value under the named test."""
    if test == "t":
        return paired_t(first, second)
    if test == "randomisation":
        return paired_randomisation(first, second, resamples=resamples, seed=seed)
    raise InputError(f"test {test!r} is not one of {', '.join(TESTS)}")


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values in the given order, never below the raw ones, never above 1."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        # never below an earlier one: a larger raw p may not end with a smaller corrected p
        largest = max(largest, (len(p_values) - place) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over queries. One value gives an interval of no width."""
    if not 0 < level < 1:
        raise InputError(f"confidence level {level} is not between 0 and 1")
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise InputError("no queries to resample")
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, _CHUNK):
        # the numbers drawn do not depend on the chunk: the generator gives the same stream in pieces
        chosen = generator.integers(0, len(sample), size=(min(_CHUNK, resamples - start), len(sample)))
        means[start : start + _CHUNK] = sample[chosen].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _differences(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    if len(first) != len(second):
        raise InputError(f"paired test needs the same queries on both sides, found {len(first)} and {len(second)}")
    return np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
