"""A changed byte in a piece of a checkpoint is found, or it changes nothing that is read."""

from __future__ import annotations

import io

import pytest
import torch

from megatron_patches.checkpoint_damage import _is_sound

BEFORE, AFTER = b"another piece", b"and another"


@pytest.fixture(scope="module")
def piece() -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": torch.arange(40.0), "step": 7}, stream)
    return stream.getvalue()


def test_a_piece_in_the_middle_of_a_file_is_sound(tmp_path, piece):
    (tmp_path / "file").write_bytes(BEFORE + piece + AFTER)
    assert _is_sound(tmp_path / "file", len(BEFORE), len(piece))
    assert not _is_sound(tmp_path / "file", len(BEFORE) + 1, len(piece)), "metadata that points elsewhere is damage as well"


def test_every_changed_byte_is_found_or_harmless(tmp_path, piece):
    found = 0
    for place in range(0, len(piece), 3):
        changed = bytearray(piece)
        changed[place] ^= 0xFF
        (tmp_path / "file").write_bytes(BEFORE + changed + AFTER)
        if _is_sound(tmp_path / "file", len(BEFORE), len(piece)):
            again = torch.load(io.BytesIO(changed), weights_only=True)
            assert again["step"] == 7 and torch.equal(again["weight"], torch.arange(40.0)), f"byte {place}"
        else:
            found += 1
    assert found > 40 * 4 // 3, "the tensor's own bytes at least"
