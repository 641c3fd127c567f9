"""The keyed shuffle is a permutation for every length and key, and looks like one drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from data_tools.epoch_order import EpochOrder
from headrank.seeds import generator, stable_hash


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 211, 1000])
@pytest.mark.parametrize("key", [(0, 0), (0, 1), (7, 0)])
def test_every_index_comes_exactly_once(length: int, key: tuple[int, int]) -> None:
    order = EpochOrder(length, *key)
    assert sorted(order[i] for i in range(length)) == list(range(length))


def test_epochs_and_seeds_differ_and_repeat_themselves() -> None:
    first, again, epoch, seed = (
        [EpochOrder(500, *key)[i] for i in range(500)] for key in [(1, 0), (1, 0), (1, 1), (2, 0)]
    )
    assert first == again
    assert first != epoch != seed != first
    assert first != sorted(first)


def test_positions_are_spread_evenly_over_many_keys() -> None:
    counts = np.zeros((10, 10))
    for key in range(2000):
        order = EpochOrder(10, key)
        for i in range(10):
            counts[i, order[i]] += 1
    # 2000 draws over ten places: mean 200, deviation 13.4; seven deviations never happen by chance
    assert np.abs(counts - 200).max() < 94


def test_hundreds_of_millions_of_samples_need_no_memory_and_stay_in_range() -> None:
    order = EpochOrder(431_000_000, 3, 0)
    values = [order[i] for i in range(0, 431_000_000, 4_310_007)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 431_000_000 for value in values)
    with pytest.raises(IndexError):
        order[431_000_000]


def test_hashes_are_fixed_and_tell_text_from_number() -> None:
    assert stable_hash(1, "a") == stable_hash(1, "a")
    assert stable_hash("1") != stable_hash(1)
    assert stable_hash("ab", "c") != stable_hash("a", "bc")
    assert generator(5, "x").integers(1 << 30) == generator(5, "x").integers(1 << 30)
