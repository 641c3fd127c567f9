"""The record of a passage: where its keys lie, how many there are, and checksums of both. No torch in here.

Records have a fixed size and are only ever appended. A record counts once its own checksum is right and its keys lie
within the key file; what a killed process wrote after the last whole record is not there for anybody.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

RECORD = np.dtype(
    [
        ("first", "<u8"),  # the digest of the passage, in two halves
        ("second", "<u8"),
        ("offset", "<u8"),  # of its keys in the key file, in bytes
        ("num_keys", "<u4"),  # tokens as stored: after pooling
        ("num_tokens", "<u4"),  # tokens of the text
        ("saturated", "<u4"),  # numbers that did not fit the int8 scale
        ("flags", "<u4"),
        ("keys_crc", "<u4"),
        ("reserved", "<u4"),
        ("check", "<u8"),
    ]
)
SHORTENED = 1  # flag: the passage's end did not fit before the branch position
_WORDS = RECORD.itemsize // 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def halves(digests: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The digests of passages as two columns of 64-bit numbers."""
    both = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    return both[:, 0], both[:, 1]


def record_checks(records: np.ndarray) -> np.ndarray:
    """The checksum that each record should have: every bit of its other fields enters."""
    words = np.ascontiguousarray(records).view("<u8").reshape(-1, _WORDS)
    mixed = np.full(len(words), 0x5851F42D4C957F2D, np.uint64)
    for column in range(_WORDS - 1):
        mixed = (mixed ^ words[:, column]) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return mixed


def keys_checksum(keys: np.ndarray) -> int:
    """CRC-32 of a passage's keys."""
    return zlib.crc32(np.ascontiguousarray(keys).data) if keys.size else 0


def valid_prefix(records: np.ndarray, keys_size: int, bytes_per_key: int) -> tuple[int, bool]:
    """How many records from the start are whole, and whether anything behind them is whole too (then it is damage,
    not an end).
    """
    ends = records["offset"] + records["num_keys"].astype(np.uint64) * np.uint64(bytes_per_key)
    is_whole = (records["check"] == record_checks(records)) & (ends <= np.uint64(keys_size))
    count = len(records) if is_whole.all() else int(np.argmin(is_whole))
    return count, bool(is_whole[count:].any())
