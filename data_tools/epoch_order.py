"""The order of samples in an epoch: a keyed permutation with random access and no memory.

A list of shuffled indices would cost gigabytes for hundreds of millions of pairs and must be rebuilt to resume. A
Feistel network permutes a slightly larger power-of-four range; stepping until the value is below n keeps it a
permutation of n.
"""

from __future__ import annotations

from headrank.seeds import stable_hash

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


class EpochOrder:
    """A pseudo-random permutation of range(n), fixed by its key: ``EpochOrder(n, seed, epoch)[i]``."""

    def __init__(self, length: int, *key: str | int) -> None:
        """``length`` is n; every other part is the key."""
        self.length = length
        self._bits = max(1, ((max(length, 2) - 1).bit_length() + 1) // 2)
        self._round_keys = [stable_hash("epoch-order", number, *key) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        """The value at ``index``, which must be in range(n)."""
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        value = self._permute(index)
        # cycle walking: the network permutes a power of two, and a walk from a valid place ends at a valid one
        while value >= self.length:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        mask = (1 << self._bits) - 1
        left, right = value >> self._bits, value & mask
        for key in self._round_keys:
            # a Feistel round is a bijection whatever _mix is, so every index comes exactly once
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._bits | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit moves every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
