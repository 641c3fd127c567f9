"""Random generators that depend on names, not on the order of calls, so that any piece of work can be redone alone."""

from __future__ import annotations

import hashlib

import numpy as np


def stable_hash(*parts: str | int) -> int:
    """A 64-bit number of the parts, equal in every process and on every machine (unlike ``hash``)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: str | int) -> np.random.Generator:
    """A generator seeded by the parts, for example (seed, "cap", context id)."""
    return np.random.Generator(np.random.PCG64(stable_hash(*parts)))
