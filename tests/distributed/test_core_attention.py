"""The core attention in its slots and families: Llama 3 rotary scaling, QKV bias, a fused module, stock Megatron,
bf16, TP 3.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrank.method.heads import HeadSet
from headrank.method.scores import calibrated_scores, sum_over_documents
from headrank.reranking.reader import AttentionReader
from tests.distributed import attention_ranks
from tests.distributed.eager_reference import EagerReference, toy_contexts
from tests.distributed.launcher import run_ranks
from tests.tiny_models import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {"qwen2": {}, "llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3}}
HEADS = {1: [0, 5], 3: [2, 7]}
SAME_PROBABILITY = 2e-6
# absolute, of scores up to one: bf16 has between two and three digits and the toy model is all noise
SAME_IN_BF16 = 0.05


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("families")
    made = {family: make_tiny_model(place / family, family, **changes) for family, changes in FAMILIES.items()}
    return {**made, "qwen3": make_tiny_model(place / "qwen3", "qwen3")}


@pytest.fixture(scope="module")
def contexts():
    return toy_contexts(416)


@pytest.fixture(scope="module")
def of_families(models, contexts):
    return run_ranks(attention_ranks.family_scores, 2, [models[family] for family in FAMILIES], contexts, HEADS)[0]


@pytest.fixture(scope="module")
def stock_place(tmp_path_factory):
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def of_slots(models, contexts, stock_place):
    return run_ranks(attention_ranks.slots, 2, models["qwen3"], contexts, HEADS, stock_place)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_hugging_face_at_tp_2(of_families, models, contexts, family):
    expected, found = EagerReference(models[family], contexts, HEADS), of_families[family]
    assert (found["scores"] - expected.scores).abs().max() < SAME_PROBABILITY
    for index, masses in enumerate(expected.masses):
        assert (found["statistics"][0][index, ..., : masses.shape[-1]] - masses).abs().max() < SAME_PROBABILITY


def test_scores_without_calibration_are_the_masses_of_the_core_heads(of_families):
    masses = of_families["qwen2"]["statistics"][0]
    expected = sum(masses[:, layer, head] for layer, heads in HEADS.items() for head in heads)
    assert (of_families["qwen2"]["raw"] - expected).abs().max() < SAME_PROBABILITY


def test_a_module_in_the_fused_slot_gives_the_same_scores_in_both_branches(of_slots):
    assert (of_slots[0]["fused"] - of_slots[0]["sdpa"]).abs().max() < SAME_PROBABILITY


def test_bf16_scores_are_near_and_in_float32(of_slots):
    assert of_slots[0]["bf16"].dtype == torch.float32
    assert (of_slots[0]["bf16"] - of_slots[0]["sdpa"]).abs().max() < SAME_IN_BF16


def test_stock_megatron_with_our_layer_spec_equals_hugging_face_and_gives_rows(of_slots, models, contexts):
    context = contexts[0]
    ids = torch.from_numpy(context.input_ids[: -context.calibration_length]).long()[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models["qwen3"], dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
    rows = expected.attentions[1][0][:, slice(*context.query_rows)].mean(1)
    for result in of_slots:
        assert (result["stock logits"] - expected.logits).abs().max() < 2e-5
        assert torch.equal(result["stock logits"], result["stock logits while capturing"])
        first, found = result["stock rows"]
        assert (found[0] - rows[first : first + found.shape[1]]).abs().max() < SAME_PROBABILITY


def test_a_checkpoint_that_stock_megatron_saved_with_stacked_layers_exports_bitwise(of_slots, models, stock_place):
    expected, found = (
        load_file(models["qwen3"] / "model.safetensors"),
        load_file(stock_place / "hf" / "model.safetensors"),
    )
    assert set(found) == set(expected) and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_embedded_model_at_tp_3_scores_as_the_transformers_engine(embedded_model):
    heads = HeadSet(((2, 0), (4, 4), (5, 8)), "headrank", "embedded", 30, 9)
    reader = AttentionReader.load(embedded_model, last_layer=heads.l_max, dtype="float32", device="cpu")
    texts = ["Fleas live two to three months.", "Rosin is made from resin.", "A flea needs a warm host."]
    contexts = [reader.encoder.encode("how long do fleas live", [("", text) for text in texts])]
    scores, masses = run_ranks(attention_ranks.embedded_scores, 3, embedded_model, contexts, heads.by_layer())[0]
    capture = reader.read(contexts, {layer: range(9) for layer in heads.by_layer()})
    query, neutral = (
        sum(rows[layer][:, head] for layer, head in heads.heads)
        for rows in (capture.query_rows, capture.calibration_rows)
    )
    owner, count = capture.layout.document_of_token_BS, capture.layout.num_documents
    assert (scores - calibrated_scores(query, neutral, owner, count)).abs().max() < SAME_PROBABILITY
    assert (
        masses[:, 0] - sum_over_documents(capture.query_rows[heads.l_max], owner, count)
    ).abs().max() < SAME_PROBABILITY
