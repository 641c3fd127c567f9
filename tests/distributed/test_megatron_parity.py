"""The Megatron model against Hugging Face eager in float32: every number and gradient, at TP 1, 2 and 4, in both
document layouts.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.eager_reference import EagerReference, toy_contexts, toy_loss
from tests.distributed.launcher import run_ranks
from tests.distributed.parity_ranks import compare_sizes
from tests.tiny_models import make_tiny_model

HEADS = {1: [0, 5], 3: [2, 3, 7]}  # at TP 4 rank 0 owns 0-1, rank 1 owns 2-3, rank 2 owns 4-5, rank 3 owns 6-7
VOCABULARY = 413  # a prime: padded at TP 2 and TP 4
SIZES = [1, 2, 4]
SAME_LOGITS = 2e-5  # absolute, logits reach 4: SDPA and eager sum in another order
SAME_PROBABILITY = 2e-6  # absolute, of masses, scores and entropies: float32 has seven digits
SAME_GRADIENT = 2e-5  # relative to the largest entry of the parameter's gradient


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("parity") / "qwen3", "qwen3", vocab_size=VOCABULARY)


@pytest.fixture(scope="module", params=["sequential", "parallel"])
def contexts(request):
    return toy_contexts(VOCABULARY, is_parallel=request.param == "parallel")


@pytest.fixture(scope="module")
def eager(model, contexts):
    return EagerReference(model, contexts, HEADS)


@pytest.fixture(scope="module")
def ranks(model, contexts):
    return run_ranks(compare_sizes, max(SIZES), model, contexts, HEADS, SIZES)


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert difference < SAME_GRADIENT, f"{name}: {difference}"


@pytest.mark.parametrize("tp", SIZES)
def test_logits_equal_hugging_face_with_a_padded_vocabulary(ranks, eager, tp):
    for row, expected in zip(ranks[0][tp]["logits"], eager.logits, strict=True):
        assert row.shape[-1] == VOCABULARY
        assert (row[: len(expected)] - expected).abs().max() < SAME_LOGITS


@pytest.mark.parametrize("tp", SIZES)
def test_masses_calibrated_masses_and_entropies_of_all_heads_equal_hugging_face_in_its_head_order(ranks, eager, tp):
    for result in ranks:  # replicated: every rank has them all
        masses, calibrated, entropies = result[tp]["statistics"]
        for index, expected in enumerate(eager.masses):
            documents = expected.shape[-1]
            assert (masses[index, ..., :documents] - expected).abs().max() < SAME_PROBABILITY
            assert (calibrated[index, ..., :documents] - eager.calibrated[index]).abs().max() < SAME_PROBABILITY
            assert (entropies[index] - eager.entropies[index]).abs().max() < 10 * SAME_PROBABILITY


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("variant", ["truncated", "recomputed", "full"])
def test_scores_and_loss_equal_hugging_face_on_every_rank(ranks, eager, contexts, tp, variant):
    scores = eager.scores.clone().requires_grad_()
    (slope,) = torch.autograd.grad(toy_loss(scores, tuple(len(context.document_spans) for context in contexts)), scores)
    same_loss = SAME_PROBABILITY * slope.abs().sum()  # what scores that count as the same may change in it
    for result in ranks:
        scores, loss, _ = result[tp][variant]
        assert (scores - eager.scores).abs().max() < SAME_PROBABILITY
        assert abs(loss - eager.loss) < same_loss


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("variant", ["truncated", "recomputed", "full"])
def test_the_gradient_of_every_parameter_equals_hugging_face(ranks, eager, tp, variant):
    _, _, gradients = ranks[0][tp][variant]
    trained = {
        name: gradient for name, gradient in eager.gradients.items() if name in gradients and gradient.abs().max() > 0
    }
    assert {f"model.layers.3.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")} <= set(
        trained
    )
    assert len(trained) == 1 + 3 * 11 + 5  # embeddings, three whole layers, norm + Q + K + their norms of the last
    assert_same_gradients(gradients, trained)


@pytest.mark.parametrize("tp", SIZES)
def test_the_truncated_model_leaves_out_exactly_what_gets_no_gradient(ranks, tp):
    _, _, full = ranks[0][tp]["full"]
    _, _, truncated = ranks[0][tp]["truncated"]
    left_out = set(full) - set(truncated)
    assert left_out == {
        name
        for name in full
        if name.startswith("model.layers.3.")
        and ("v_proj" in name or "o_proj" in name or "mlp" in name or "post" in name)
    }
    assert all(full[name].abs().max() == 0 for name in left_out)
    assert_same_gradients(truncated, {name: full[name] for name in truncated})


@pytest.mark.parametrize("tp", SIZES)
def test_ranks_without_a_core_head_still_take_part_in_backward(ranks, model, contexts, tp):
    expected = EagerReference(model, contexts, {layer: [0] for layer in HEADS})
    scores, _, gradients = ranks[-1][tp]["heads of rank 0"]
    assert (scores - expected.scores).abs().max() < SAME_PROBABILITY
    assert_same_gradients(gradients, {name: expected.gradients[name] for name in gradients})
