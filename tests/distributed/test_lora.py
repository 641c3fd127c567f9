"""Adapters on Megatron against Hugging Face + peft in float32: scores and the gradient of every factor, at TP 1, 2
and 4.
"""

from __future__ import annotations

import pytest

pytest.importorskip("peft", reason="peft (headrank[dev]) is the reference")

from headrank.lora_settings import PROJECTIONS, LoraSettings
from tests.adapters import make_tiny_adapter
from tests.distributed.eager_reference import EagerReference, toy_contexts
from tests.distributed.launcher import run_ranks
from tests.distributed.lora_ranks import compare_sizes, import_with_adapter
from tests.tiny_models import make_tiny_model

HEADS = {1: [0, 5], 3: [2, 3, 7]}
VOCABULARY = 413
SIZES = [1, 2, 4]
SAME_SCORE = 2e-6  # absolute, as in test_megatron_parity.py
SAME_GRADIENT = 3e-5  # relative to the largest entry of the factor's gradient


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    model = make_tiny_model(root / "model", "qwen3", vocab_size=VOCABULARY)
    adapter = make_tiny_adapter(root / "adapter", model)
    run_ranks(import_with_adapter, 1, model, adapter, root / "checkpoint")
    return model, adapter, root / "checkpoint"


@pytest.fixture(scope="module")
def contexts():
    return toy_contexts(VOCABULARY)


@pytest.fixture(scope="module")
def eager(folders, contexts):
    model, adapter, _ = folders
    return EagerReference(model, contexts, HEADS, adapter)


@pytest.fixture(scope="module")
def ranks(folders, contexts):
    model, _, checkpoint = folders
    return run_ranks(compare_sizes, max(SIZES), model, checkpoint, LoraSettings(3, 5.0), contexts, HEADS, SIZES)


VARIANTS = [
    (tp, name) for tp in SIZES for name in ("plain", "recomputed", "sequence parallel") if tp > 1 or name[0] != "s"
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_an_adapted_model_equal_peft_on_every_rank(ranks, eager, folders, contexts, variant):
    plain = EagerReference(folders[0], contexts, HEADS)
    assert (plain.scores - eager.scores).abs().max() > 100 * SAME_SCORE, "the adapter must matter"
    for result in ranks:
        assert (result[variant]["scores"] - eager.scores).abs().max() < SAME_SCORE


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_of_every_factor_equals_peft_and_the_base_has_no_buffer(ranks, eager, variant):
    for result in ranks:
        found = result[variant]["gradients"]
        expected = {
            name: gradient for name, gradient in eager.gradients.items() if "lora_" in name and gradient.abs().max() > 0
        }
        # three whole layers, Q and K of the last
        assert set(found) == set(expected) and len(found) == 2 * (3 * len(PROJECTIONS) + 2)
        for name, gradient in expected.items():
            difference = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert difference < SAME_GRADIENT, f"{name}: {difference}"
