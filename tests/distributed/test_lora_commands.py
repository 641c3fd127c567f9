"""Adapters through the commands: a PEFT folder in, a checkpoint, and out again alone or merged; what cannot be done
is one line.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft", reason="peft (headrank[dev]) makes the adapters and loads the exports")

from headrank import HeadRankReranker
from headrank.method.heads import HeadSet
from tests.adapters import make_tiny_adapter
from tests.distributed.command_ranks import run_commands
from tests.distributed.launcher import run_ranks
from tests.tiny_models import make_tiny_model

QUERY, PASSAGES = "how long do fleas live", ["Fleas live two months.", "Rosin is resin.", "A host is warm."]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("lora")
    make_tiny_model(place / "model", "qwen3")
    make_tiny_model(place / "other", "qwen3", intermediate_size=80)
    make_tiny_adapter(
        place / "adapter", place / "model", targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    )
    for name, heads in (("heads", ((1, 3), (2, 5))), ("others", ((0, 1), (3, 2)))):
        HeadSet(heads, "headrank", "tiny", 4, 8).save(place / f"{name}.json")
    return place


@pytest.fixture(scope="module")
def results(place):
    at = str(place)
    model = ["--base", f"{at}/model", "--heads", f"{at}/heads.json", "--output"]
    commands = {
        "plain": ["import-hf", "--hf", f"{at}/model", "--output", f"{at}/plain"],
        "import": ["import-hf", "--hf", f"{at}/model", "--adapter", f"{at}/adapter", "--output", f"{at}/checkpoint"],
        "alone": [
            "export-hf",
            "--checkpoint",
            f"{at}/checkpoint",
            *model,
            f"{at}/alone",
            "--adapter-only",
            "--base-name",
            "org/tiny",
        ],
        "merged": ["export-hf", "--checkpoint", f"{at}/checkpoint", *model, f"{at}/merged"],
        "short": ["export-hf", "--checkpoint", f"{at}/checkpoint", *model, f"{at}/short", "--truncate"],
        "other heads": [
            "export-hf",
            "--exported",
            f"{at}/alone",
            "--base",
            f"{at}/model",
            "--heads",
            f"{at}/others.json",
        ]
        + ["--output", f"{at}/exchanged"],
        "no adapters": ["export-hf", "--checkpoint", f"{at}/plain", *model, f"{at}/x", "--adapter-only"],
        "cut": ["export-hf", "--checkpoint", f"{at}/checkpoint", *model, f"{at}/x", "--adapter-only", "--truncate"],
        "of another": ["import-hf", "--hf", f"{at}/other", "--adapter", f"{at}/adapter", "--output", f"{at}/x"],
        "as a base": ["import-hf", "--hf", f"{at}/adapter", "--output", f"{at}/x"],
        "not there": ["import-hf", "--hf", f"{at}/model", "--adapter", f"{at}/model", "--output", f"{at}/x"],
    }
    return dict(zip(commands, run_ranks(run_commands, 1, list(commands.values()))[0], strict=True))


def test_an_adapter_goes_through_a_checkpoint_unchanged_and_the_flags_that_train_it_are_printed(results, place):
    targets = "--headrank-lora-targets q_proj v_proj o_proj gate_proj down_proj"
    assert (
        results["import"][1].splitlines()[1] == f"its adapter: --headrank-lora-rank 3 --headrank-lora-alpha 5 {targets}"
    )
    assert results["alone"][:2] == (0, f"{place}/alone: adapter, 2 heads\n")
    before, after = (load_file(place / name / "adapter_model.safetensors") for name in ("adapter", "alone"))
    assert set(before) == set(after) and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert json.loads((place / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"
    assert "base_model_relation: adapter" in (place / "alone" / "README.md").read_text()


def test_peft_and_transformers_load_the_exported_adapter_without_a_missing_tensor(results, place, recwarn):
    import transformers
    from peft import PeftModel

    tokens = torch.arange(3, 40)[None]
    logits = {}
    for name in ("adapter", "alone"):
        base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, place / name)
        assert len([key for key, _ in adapted.named_parameters() if "lora_" in key]) == 2 * 4 * 5
        logits[name] = adapted(tokens).logits.detach()
    assert torch.equal(logits["adapter"], logits["alone"])
    assert not [warning for warning in recwarn if "missing" in str(warning.message)]
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    base.load_adapter(str(place / "alone"))
    assert torch.allclose(base(tokens).logits, logits["alone"], atol=1e-5)


def test_the_adapter_alone_merged_and_merged_and_cut_rank_alike(results, place):
    scores = {
        name: HeadRankReranker.from_pretrained(place / name, device="cpu", dtype="float32").score(QUERY, PASSAGES)
        for name in ("alone", "merged", "short")
    }
    assert np.array_equal(scores["alone"], scores["merged"]) and np.array_equal(scores["alone"], scores["short"])
    untouched = HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu").score(
        QUERY, PASSAGES
    )
    assert not np.allclose(scores["alone"], untouched)


def test_an_exported_adapter_is_written_again_with_other_heads(results, place):
    assert results["other heads"][0] == 0, results["other heads"]
    assert HeadRankReranker.from_pretrained(place / "exchanged", device="cpu").heads.heads == ((0, 1), (3, 2))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no adapters", "holds no adapters (its training had none); leave it out"),
        ("cut", "so --truncate has no meaning with it"),
        ("of another", "adapts a weight [64, 96], which the base model does not have there"),
        ("as a base", "an adapter without weights; give its base model"),
        ("not there", "adapter_config.json"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(results, place, case, words):
    code, _, errors = results[case]
    assert code == 2 and words in errors.splitlines()[-1] and "Traceback" not in errors
    assert not (place / "x").exists()
