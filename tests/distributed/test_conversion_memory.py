"""How much memory conversion takes: one copy of the weights going in, a fraction of one coming out, whatever the
file's size.
"""

from __future__ import annotations

import pytest

from tests.distributed.conversion_ranks import peak_of_export, peak_of_import
from tests.distributed.launcher import run_ranks
from tests.tiny_models import make_tiny_model

SIZES = {"num_hidden_layers": 16, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of some 200 MB in one file, and a tiny one whose conversion loads everything that is loaded late."""
    place = tmp_path_factory.mktemp("memory")
    make_tiny_model(place / "tiny", "qwen3")
    make_tiny_model(place / "model", "qwen3", std=0.02, **SIZES)
    return place


def test_import_holds_one_copy_and_export_never_a_whole_one(place):
    copy = (place / "model" / "model.safetensors").stat().st_size
    assert copy > 180e6
    (growth,) = run_ranks(peak_of_import, 1, place / "tiny", place / "model", place / "megatron")
    assert 0.9 * copy < growth < 1.6 * copy  # 1.36 was seen; 2.2 while the whole file stayed mapped
    (growth,) = run_ranks(peak_of_export, 1, place / "tiny", place / "model", place / "megatron", place / "hf")
    assert growth < 0.6 * copy  # 0.33 was seen
