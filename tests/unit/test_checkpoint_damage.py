"""A changed byte in a piece of a checkpoint is found, or it changes nothing that is read."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.checkpoints.damage import _is_sound
from megatron_patches.checkpoints.files import is_complete

BEFORE, AFTER = b"another piece", b"and another"


@pytest.fixture(scope="module")
def piece() -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": torch.arange(40.0), "step": 7}, stream)
    return stream.getvalue()


def test_a_piece_in_the_middle_of_a_file_is_sound(tmp_path, piece):
    (tmp_path / "file").write_bytes(BEFORE + piece + AFTER)
    assert _is_sound(tmp_path / "file", len(BEFORE), len(piece))
    assert not _is_sound(tmp_path / "file", len(BEFORE) + 1, len(piece)), (
        "metadata that points elsewhere is damage as well"
    )


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


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (pickle.dumps(Metadata({}, storage_data={})), True),
        (pickle.dumps(Metadata({}, storage_data={"weight": "changed"})), False),
        (pickle.dumps(Metadata({}, storage_data=7)), False),
        (b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little"), False),  # bytes of a length that no machine has
    ],
    ids=["whole", "entry", "table", "length"],
)
def test_metadata_that_cannot_be_read_is_no_complete_checkpoint(tmp_path, piece, metadata, expected):
    (tmp_path / "common.pt").write_bytes(piece)
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / ".metadata").write_bytes(metadata)
    assert is_complete(tmp_path) == expected
