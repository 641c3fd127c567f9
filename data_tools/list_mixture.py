"""Several training folders as one stream of lists, with shares: which list comes next, from its number alone.

Without shares an epoch shows every list of every folder once, in one order. With shares (``DIR=3``) a fixed cycle of
slots is dealt to the folders; each folder then has epochs of its own, so a small one with a large share is repeated
more often. Either way nothing is drawn in memory and a run resumes at any number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data_tools.epoch_order import EpochOrder
from headrank.errors import InputError
from headrank.seeds import generator

_SLOTS = 1000  # of a cycle: shares are kept to a thousandth


def parse_shares(given: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Folders and their shares from ``DIR`` or ``DIR=SHARE``; shares are for all folders or for none."""
    folders: list[str] = []
    shares: list[float] = []
    for text in given:
        folder, equals, number = text.rpartition("=")
        if not equals:
            folders.append(text)
            continue
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not (0 < share < math.inf) or not folder:
            raise InputError(f"{flag} {text}: the share after '=' must be a number above 0, as in DIR=0.5")
        folders.append(folder)
        shares.append(share)
    if shares and len(shares) != len(folders):
        raise InputError(f"{flag}: {len(shares)} of {len(folders)} folders have a share; give all of them one, or none")
    if len(set(folders)) != len(folders):
        raise InputError(f"{flag}: a folder is given twice; give it once, with a larger share")
    return folders, shares or None


class ListMixture:
    """The folder and the list of every number since the start of training."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[float] | None, seed: int) -> None:
        """``sizes`` are the lists of each folder."""
        self.sizes, self.seed = tuple(sizes), seed
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        # one shuffled cycle of a thousand slots instead of a draw per step: shares are exact, and any step can be asked
        # for
        self._slots = None if shares is None else generator(seed, "mixture").permutation(_deal(shares))
        if self._slots is not None:
            self._counts = np.bincount(self._slots, minlength=len(sizes))
            self._places = np.array(
                [int((self._slots[:slot] == folder).sum()) for slot, folder in enumerate(self._slots)]
            )
        self._orders: dict[int, tuple[int, EpochOrder]] = {}

    def __len__(self) -> int:
        """Lists of an epoch: as many as there are."""
        return int(self._starts[-1])

    def at(self, number: int) -> tuple[int, int, int]:
        """(folder, list within it, epoch of that folder) of a number since the start of training."""
        if self._slots is None:
            epoch, index = divmod(number, len(self))
            place = self._order(-1, len(self), epoch)[index]
            folder = int(np.searchsorted(self._starts, place, side="right")) - 1
            return folder, place - int(self._starts[folder]), epoch
        cycle, slot = divmod(number, len(self._slots))
        folder = int(self._slots[slot])
        epoch, index = divmod(cycle * int(self._counts[folder]) + int(self._places[slot]), self.sizes[folder])
        return folder, self._order(folder, self.sizes[folder], epoch)[index], epoch

    def _order(self, folder: int, size: int, epoch: int) -> EpochOrder:
        known = self._orders.get(folder)
        # one order per folder is kept: steps go through epochs in sequence
        if known is None or known[0] != epoch:
            known = self._orders[folder] = (epoch, EpochOrder(size, self.seed, "folder", folder, epoch))
        return known[1]


def _deal(shares: Sequence[float]) -> np.ndarray:
    """The folder of each slot, by largest remainders; every folder gets at least one."""
    exact = np.array(shares) / sum(shares) * _SLOTS
    # at least one slot: a folder that was given is read, however small its share
    counts = np.maximum(np.floor(exact).astype(int), 1)
    for folder in np.argsort(np.floor(exact) - exact, kind="stable")[: max(0, _SLOTS - int(counts.sum()))]:
        counts[folder] += 1
    return np.repeat(np.arange(len(counts)), counts)
