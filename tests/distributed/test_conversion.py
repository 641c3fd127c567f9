"""Hugging Face -> Megatron -> Hugging Face, bitwise, at every TP size; what an export contains and what a killed one
leaves.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrank import HeadRankReranker
from headrank.method.heads import HeadSet
from headrank.method.spans import PromptEncoder
from tests.distributed import conversion_ranks
from tests.distributed.launcher import RankFailure, run_ranks
from tests.tiny_models import make_tiny_model, tiny_tokenizer

VARIANTS = {
    "tied-g2": ("qwen3", {}),
    "untied-g1-odd-vocabulary": ("qwen3", {"num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 413}),
    "tied-g4-odd-vocabulary": (
        "qwen3",
        {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 413},
    ),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2-bias": ("qwen2", {}),
}
SIZES = [1, 2, 4]
QUERY = "how long do fleas live"
DOCUMENTS = [
    "The flea lives for about two to three months.",
    "Rosin makes the bow grip.",
    "Concrete floors cost two dollars a square foot.",
]
HEADS = ((1, 0), (1, 5), (2, 3), (2, 6))
SAME_SCORE = 2e-6  # float32 probabilities, SDPA with other shapes


def tensors_of(directory):
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def assert_bitwise_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    made = {name: make_tiny_model(place / name, family, **changes) for name, (family, changes) in VARIANTS.items()}
    half = transformers.AutoModelForCausalLM.from_pretrained(made["tied-g2"], dtype=torch.bfloat16)
    half.save_pretrained(place / "bfloat16")
    return {**made, "bfloat16": place / "bfloat16"}


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    place = tmp_path_factory.mktemp("converted")
    run_ranks(conversion_ranks.round_trips, max(SIZES), list(models.values()), place, SIZES)
    return place


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        (name, tp)
        for name in [*VARIANTS, "bfloat16"]
        for tp in (SIZES if name not in ("llama-untied", "qwen2-bias") else [2])
    ],
)
def test_a_round_trip_is_bitwise_equal_with_the_same_keys(models, converted, name, tp):
    output = converted / f"{name}-tp{tp}" / "hf"
    assert_bitwise_equal(tensors_of(output), tensors_of(models[name]))
    assert json.loads((output / "config.json").read_text()) == json.loads((models[name] / "config.json").read_text())
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(models[name]))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(models[name]).values())


def test_an_import_by_several_processes_loads_at_any_size_whole_or_truncated(models, tmp_path):
    results = run_ranks(conversion_ranks.import_and_load, 2, models["tied-g2"], tmp_path / "megatron", [1, 2], 2)
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    expected = tensors_of(models["tied-g2"])
    for weights in results[0].values():
        assert (
            "model.layers.2.self_attn.q_proj.weight" in weights
            and "model.layers.2.self_attn.v_proj.weight" not in weights
        )
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    heads = HeadSet(HEADS, "headrank", str(models["tied-g2"]), 4, 8)
    context = PromptEncoder(tiny_tokenizer(), heads.prompt).encode(QUERY, [("", text) for text in DOCUMENTS])
    scores, weights = run_ranks(conversion_ranks.train_and_export, 2, models["tied-g2"], [context], heads, place)[0]
    return place, scores[0], weights


@pytest.mark.parametrize("kind", ["full", "short"])
def test_the_exported_model_scores_and_ranks_as_the_training_model(trained, kind):
    place, expected, _ = trained
    reranker = HeadRankReranker.from_pretrained(place / kind, dtype="float32", device="cpu")
    assert reranker.heads.heads == HEADS
    scores = torch.from_numpy(reranker.score_batch([(QUERY, DOCUMENTS)])[0].scores)
    assert (scores - expected).abs().max() < SAME_SCORE
    ranked = [hit["corpus_id"] for hit in reranker.rank(QUERY, DOCUMENTS)]
    assert ranked == expected.argsort(descending=True).tolist()


def test_a_full_export_loads_with_plain_transformers_and_keeps_what_was_not_trained(trained, models):
    place, _, weights = trained
    _, report = transformers.AutoModelForCausalLM.from_pretrained(place / "full", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base, found = tensors_of(models["tied-g2"]), tensors_of(place / "full")
    assert set(found) == set(base)
    for name, tensor in found.items():
        assert torch.equal(tensor, weights.get(name, base[name])), name
    assert not torch.equal(found["model.layers.1.mlp.up_proj.weight"], base["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(found["model.layers.2.self_attn.v_proj.weight"], base["model.layers.2.self_attn.v_proj.weight"])


def test_a_truncated_export_holds_only_the_layers_that_inference_needs(trained):
    place, _, _ = trained
    layers = {int(name.split(".")[2]) for name in tensors_of(place / "short") if name.startswith("model.layers.")}
    config = json.loads((place / "short" / "config.json").read_text())
    assert layers == {0, 1, 2}
    assert (config["num_hidden_layers"], config["headrank_source_layers"], len(config["layer_types"])) == (3, 4, 3)
    assert "lm_head.weight" not in tensors_of(place / "short")


@pytest.mark.parametrize("kind", ["full", "short"])
def test_headrank_json_and_the_model_card_state_heads_prompt_and_training(trained, kind):
    place, _, _ = trained
    values = json.loads((place / kind / "headrank.json").read_text())
    heads = HeadSet.from_dict(values["heads"])
    assert (values["format"], values["is_truncated"]) == ("headrank/1", kind == "short")
    assert (heads.heads, heads.l_max, values["heads"]["prompt_hash"]) == (HEADS, 2, heads.prompt.hash)
    # without the path
    assert values["training"]["progress"] == {"iteration": 3} and values["training"]["config"] == {"lr": 1e-3}
    assert values["heads"]["model"] == "tied-g2"  # without the path
    card = (place / kind / "README.md").read_text()
    assert "\npipeline_tag: text-ranking\n" in card and "HeadRankReranker.from_pretrained(" in card
    assert "L1-H0, L1-H5, L2-H3, L2-H6" in card and str(place) not in card


@pytest.fixture(scope="module")
def checked(models, tmp_path_factory):
    """A killed export, then everything else that needs one process only, in the same place."""
    place = tmp_path_factory.mktemp("checked")
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(conversion_ranks.die_while_exporting, 1, models["tied-g2"], place)
    left = {
        path.name: sorted(item.name for item in path.iterdir()) for path in place.iterdir() if path.name != "megatron"
    }
    return place, left, run_ranks(conversion_ranks.single_process_checks, 1, models["tied-g2"], place)[0]


def test_a_killed_export_leaves_nothing_that_looks_finished_and_can_be_repeated(checked, models):
    place, left, _ = checked
    assert "hf" not in left
    assert all(name.startswith(".") and "config.json" not in files for name, files in left.items())
    assert_bitwise_equal(tensors_of(place / "hf"), tensors_of(models["tied-g2"]))
    assert not (place / ".hf.partial").exists()


def test_a_failed_export_leaves_nothing(checked):
    assert checked[2]["left after a failure"] == []


def test_an_export_never_replaces_a_directory_unasked(checked):
    assert "already exists" in checked[2]["again"] and "`overwrite`" in checked[2]["again"]


def test_truncating_without_heads_says_what_is_missing(checked):
    assert "a heads.json with `heads`" in checked[2]["truncate without heads"]


def test_torn_checkpoints_are_skipped_with_a_warning(checked):
    found = checked[2]
    assert (found["latest"], found["complete"], found["loaded"]) == (1, [1], {"iteration": 1})
    assert any("iter_0000003 is missing or torn" in line for line in found["warned"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("torn on demand", ["iter_0000003", "no complete checkpoint", "[1]"]),
        ("no optimizer", ["without its optimizer", "--no-load-optim"]),
        ("other depth", ["layers 0-2 only", "export-hf"]),
        ("nothing there", ["nowhere", "no checkpoint here"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(checked, case, words):
    assert all(word in checked[2][case] for word in words), checked[2][case]
