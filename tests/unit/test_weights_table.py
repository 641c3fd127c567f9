"""The weight table without Megatron processes: fusing and cutting, both spellings, files, sizes, and every refusal."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrank.errors import InputError
from megatron_patches.checkpoints.safetensors_files import (
    SafetensorsReader,
    parse_size,
    plan_shards,
    write_index,
    write_shard,
)
from megatron_patches.checkpoints.weights import (
    join_sources,
    mapping_of,
    megatron_names,
    read_shard,
    source_shape,
    split_sources,
)
from megatron_patches.shape import ModelShape, check_tensor_parallel_size, valid_tensor_parallel_sizes
from tests.tiny_models import make_tiny_model, tiny_config

QWEN3_SIZES = {"0.6B": (16, 8, 3072), "1.7B": (16, 8, 6144), "4B": (32, 8, 9728)}


def shape_of(**changes) -> ModelShape:
    return dataclasses.replace(ModelShape.from_hf(tiny_config("qwen3")), **changes)


def random_sources(shape, name):
    return [torch.randn(source_shape(shape, source)) for source in mapping_of(name).sources]


@given(groups=st.sampled_from([1, 2, 4]), heads_per_group=st.sampled_from([1, 2, 4]), head_dim=st.sampled_from([2, 8]))
def test_splitting_is_the_inverse_of_joining_for_every_grouping(groups, heads_per_group, head_dim):
    shape = shape_of(heads=groups * heads_per_group, groups=groups, head_dim=head_dim)
    for name in ("self_attention.linear_qkv.weight", "self_attention.linear_qk.weight", "mlp.linear_fc1.weight"):
        row, sources = mapping_of(f"decoder.layers.0.{name}"), random_sources(shape, f"decoder.layers.0.{name}")
        parts = split_sources(row, join_sources(row, sources, groups), shape)
        assert list(parts) == list(row.sources)
        assert all(torch.equal(parts[source], tensor) for source, tensor in zip(row.sources, sources, strict=True))


def test_a_fused_group_holds_its_queries_then_its_key_then_its_value():
    shape = shape_of(heads=4, groups=2, head_dim=1, hidden=1)
    row = mapping_of("decoder.layers.0.self_attention.linear_qkv.weight")
    query, key, value = (
        torch.tensor([[1.0], [2], [3], [4]]),
        torch.tensor([[10.0], [20]]),
        torch.tensor([[100.0], [200]]),
    )
    assert join_sources(row, [query, key, value], shape.groups).flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_each_rank_stacks_its_own_gate_over_its_own_up(tmp_path):
    shape = shape_of(ffn=4, hidden=1)
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": torch.arange(4.0)[:, None],
        "model.layers.0.mlp.up_proj.weight": torch.arange(10.0, 14)[:, None],
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        shards = [
            read_shard(reader, "decoder.layers.0.mlp.linear_fc1.weight", shape, rank, 2).flatten().tolist()
            for rank in range(2)
        ]
    assert shards == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_padding_rows_of_the_vocabulary_are_zero_and_on_the_last_ranks(tmp_path):
    shape = shape_of(vocab=5, hidden=2)
    save_file({"model.embed_tokens.weight": torch.ones(5, 2)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        shards = [read_shard(reader, "embedding.word_embeddings.weight", shape, rank, 4) for rank in range(4)]
    assert [shard.sum().item() for shard in shards] == [4, 4, 2, 0] and {tuple(shard.shape) for shard in shards} == {
        (2, 2)
    }


@pytest.mark.parametrize(
    ("local", "engine"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ],
)
def test_both_layer_specs_spell_the_same_norms(local, engine):
    assert mapping_of(f"decoder.layers.3.{local}") == mapping_of(f"decoder.layers.3.{engine}")


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_table_names_every_tensor_of_a_model_and_its_exact_shape(tmp_path, family, is_tied):
    directory = make_tiny_model(tmp_path / family, family, tie_word_embeddings=is_tied)
    shape = ModelShape.from_hf(directory)
    sources = [source for name in megatron_names(shape) for source in mapping_of(name).sources]
    with SafetensorsReader(directory) as reader:
        assert sorted(sources) == sorted(reader.names())
        assert all(reader.shape(source) == source_shape(shape, source) for source in sources)


@pytest.mark.parametrize(("heads", "groups", "ffn"), QWEN3_SIZES.values(), ids=QWEN3_SIZES)
def test_the_papers_models_can_be_split_over_1_2_4_and_8(heads, groups, ffn):
    assert valid_tensor_parallel_sizes(shape_of(heads=heads, groups=groups, ffn=ffn)) == (1, 2, 4, 8)


def test_the_embedded_models_shape_can_be_split_over_1_and_3():
    assert valid_tensor_parallel_sizes(shape_of(heads=9, groups=3, ffn=1536)) == (1, 3)


def test_a_size_that_does_not_divide_names_the_ones_that_do():
    with pytest.raises(InputError, match="`tensor_model_parallel_size` 2 .*9 heads, 3 key-value groups.* over 1, 3"):
        check_tensor_parallel_size(shape_of(heads=9, groups=3, ffn=1536), 2)


@pytest.mark.parametrize(
    "scaling",
    [None, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}],
)
def test_rotary_frequencies_equal_hugging_face_bit_for_bit(scaling):
    rope = {"rope_type": "default" if scaling is None else "llama3", "rope_theta": 500000.0, **(scaling or {})}
    config = tiny_config("llama", rope_parameters=rope, head_dim=32)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(ModelShape.from_hf(config).inverse_frequencies(), expected)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {}, "'mistral' has no Megatron mapping"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            "rotary scaling 'linear'",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding-window"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
    ],
)
def test_what_megatron_would_silently_ignore_is_refused(family, changes, words):
    with pytest.raises(InputError, match=words):
        ModelShape.from_hf(tiny_config(family, **changes))


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, damage):
    directory = make_tiny_model(tmp_path / "model", "qwen3")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    if damage == "missing":
        del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    expected = "is missing" if damage == "missing" else r"has shape \[63, 64\], config.json asks for \[64, 64\]"
    with SafetensorsReader(directory) as reader, pytest.raises(InputError, match=f"k_proj.weight' {expected}"):
        read_shard(reader, "decoder.layers.2.self_attention.linear_qkv.weight", ModelShape.from_hf(directory))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no model.safetensors"),
        ({"model.safetensors": "not safetensors"}, "cannot be read as safetensors"),
        ({"model.safetensors.index.json": "{}"}, "not a safetensors index"),
        ({"model.safetensors.index.json": "{"}, "not a safetensors index"),
    ],
)
def test_a_directory_without_readable_weights_is_refused(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        SafetensorsReader(tmp_path)


def test_names_without_the_model_prefix_are_found_too(tmp_path):
    save_file({"embed_tokens.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert "model.embed_tokens.weight" in reader and reader.read("model.embed_tokens.weight").shape == (2, 3)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_shards_keep_the_order_and_the_limit(sizes, limit):
    named = {f"t{index}": size for index, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    assert all(len(shard) == 1 or sum(named[name] for name in shard) <= limit for shard in shards)
    assert all(sum(named[name] for name in one) + named[other[0]] > limit for one, other in itertools.pairwise(shards))


def test_a_shard_written_piece_by_piece_reads_back_with_safetensors(tmp_path):
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "full": torch.randn(2, 5),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_shard(tmp_path / "model.safetensors", layout, reversed(tensors.items()))
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(tensors) and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_single_file_has_no_index_and_several_have_one(tmp_path):
    write_index(tmp_path, [["a", "b"]], {"a": 1, "b": 2})
    assert not list(tmp_path.iterdir())
    write_index(tmp_path, [["b"], ["a"]], {"a": 1, "b": 2})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 3},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }


@pytest.mark.parametrize(("text", "expected"), [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("1.5KiB", 1536), ("12", 12)])
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "GB", "five", "-1GB", "5TB"])
def test_a_size_that_is_none_is_shown_as_given(text):
    with pytest.raises(InputError, match=f"`max_shard_size` '{text}'"):
        parse_size(text)
