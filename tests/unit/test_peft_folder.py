"""PEFT adapter folders without peft: what is read, merged, written and refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrank.errors import InputError
from headrank.lora_settings import LoraSettings
from headrank.reranking.model_sources import ADAPTER_CONFIG
from headrank.reranking.peft_folder import (
    WEIGHTS_NAME,
    PeftAdapter,
    adapter_of,
    merge_weights,
    target_pattern,
    write_adapter,
)

Q, UP = "layers.0.self_attn.q_proj", "layers.10.mlp.up_proj"


@pytest.fixture
def factors():
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(2, 3, generator=generator), torch.randn(4, 2, generator=generator)) for name in (Q, UP)}


@pytest.fixture
def folder(tmp_path, factors):
    write_adapter(tmp_path, factors, LoraSettings(2, 6.0, ("q_proj", "up_proj")), base_name="some/base")
    return tmp_path


def change(folder, **settings):
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | settings))


def test_what_was_written_is_read_back(folder, factors):
    adapter = PeftAdapter.read(folder)
    assert adapter.base_name == "some/base" and adapter.settings() == LoraSettings(2, 6.0, ("q_proj", "up_proj"))
    assert all(
        torch.equal(found, given)
        for name in factors
        for found, given in zip(adapter.factors[name], factors[name], strict=True)
    )


def test_a_merged_weight_is_the_weight_plus_alpha_over_rank_times_b_a(folder, factors):
    low, high = factors[Q]
    weight = torch.randn(4, 3)
    expected = [
        [float(weight[i, j]) + 3.0 * sum(float(high[i, k] * low[k, j]) for k in range(2)) for j in range(3)]
        for i in range(4)
    ]
    assert torch.allclose(PeftAdapter.read(folder).merged(Q, weight), torch.tensor(expected), atol=1e-6)
    assert PeftAdapter.read(folder).merged("layers.0.self_attn.k_proj", weight) is weight


def test_merging_adds_in_float32_and_leaves_the_rounding_to_its_caller(folder, factors):
    weight = torch.randn(4, 3).bfloat16()
    low, high = factors[Q]
    merged = PeftAdapter.read(folder).merged(Q, weight)
    assert merged.dtype == torch.float32 and torch.equal(merged, weight.float() + 3.0 * (high @ low))


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(folder):
    change(folder, use_rslora=True)
    assert PeftAdapter.read(folder).scale(4) == pytest.approx(3.0)


def test_weights_above_the_depth_that_is_loaded_are_not_missed_and_others_are(folder):
    weight = torch.zeros(4, 3)
    merged = dict(merge_weights(folder, [(f"{Q}.weight", weight), ("norm.weight", weight)], 1))
    assert merged[f"{Q}.weight"].abs().max() > 0 and merged["norm.weight"] is weight
    with pytest.raises(InputError, match="adapts 'layers.10.mlp.up_proj', which its base model does not have"):
        dict(merge_weights(folder, [(f"{Q}.weight", weight)], 11))
    with pytest.raises(InputError, match=r"is for a weight \[4, 3\], the base model's is \[5, 3\]"):
        dict(merge_weights(folder, [(f"{Q}.weight", torch.zeros(5, 3))], 1))


def test_the_pattern_of_targets_matches_exactly_the_adapted_modules():
    modules = {f"layers.{layer}.self_attn.{name}" for layer in (0, 1, 10) for name in ("q_proj", "v_proj")} | {
        "layers.11.self_attn.q_proj"
    }
    pattern = target_pattern(modules)
    everything = {f"layers.{layer}.self_attn.{name}" for layer in range(12) for name in ("q_proj", "k_proj", "v_proj")}
    for prefix in ("", "model."):
        assert {name for name in everything if re.fullmatch(pattern, prefix + name)} == modules


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora is True, only plain LoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa' also changes the base model"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"lora_alpha": "much"}, "lora_alpha 'much' is not a number"),
    ],
)
def test_whatever_is_not_plain_lora_is_refused_by_name(folder, settings, words):
    change(folder, **settings)
    with pytest.raises(InputError, match=words):
        PeftAdapter.read(folder)


def test_tensors_that_are_no_pairs_are_refused(folder):
    tensors = load_file(folder / WEIGHTS_NAME)
    key = f"base_model.model.model.{Q}.lora_A.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, folder / WEIGHTS_NAME)
    with pytest.raises(InputError, match="has no pair"):
        PeftAdapter.read(folder)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(1)}, folder / WEIGHTS_NAME)
    with pytest.raises(InputError, match=r"lm_head.weight' is not LoRA's"):
        PeftAdapter.read(folder)
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(InputError, match="is not there"):
        PeftAdapter.read(folder)


def test_training_goes_on_only_from_an_adapter_of_one_rank_on_known_projections(folder, factors):
    changed = {Q: factors[Q], UP: (torch.zeros(3, 3), torch.zeros(4, 3))}
    write_adapter(folder, changed, LoraSettings(2, 6.0), base_name="b")
    with pytest.raises(InputError, match=r"has ranks \[2, 3\]"):
        PeftAdapter.read(folder).settings()
    write_adapter(folder, {"layers.0.attention.dense": factors[Q]}, LoraSettings(2, 6.0), base_name="b")
    with pytest.raises(InputError, match="adapts more than q_proj"):
        PeftAdapter.read(folder).settings()


def test_a_folder_without_adapter_config_has_no_adapter(tmp_path):
    assert adapter_of(tmp_path) is None
