"""`headrank import-hf` and `headrank export-hf` as commands: one process or two, and one-line refusals with exit
code 2.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from headrank import HeadRankReranker
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from tests.distributed.command_ranks import run_commands, run_commands_on_a_full_disk
from tests.distributed.launcher import run_ranks
from tests.tiny_models import make_tiny_model


def tensors_of(directory):
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("commands")
    make_tiny_model(place / "model", "qwen3")
    make_tiny_model(place / "other", "qwen3", intermediate_size=80)
    make_tiny_model(place / "mistral", "mistral")
    HeadSet(((1, 3), (2, 5)), "headrank", "tiny", 4, 8).save(place / "heads.json")
    HeadSet(((1, 3), (9, 5)), "headrank", "tiny", 12, 8).save(place / "deep.json")
    HeadSet(((0, 1), (3, 2)), "entropy", "tiny", 4, 8).save(place / "others.json")
    HeadSet(((0, 1), (3, 2)), "entropy", "tiny", 4, 8, prompt=PromptTemplate(max_words=64)).save(
        place / "short_prompt.json"
    )
    return place


@pytest.fixture(scope="module")
def alone(place):
    at = str(place)
    base = ["export-hf", "--checkpoint", f"{at}/megatron", "--base", f"{at}/model", "--output"]
    again = ["export-hf", "--base", f"{at}/model", "--exported"]
    commands = {
        "import": [
            "import-hf",
            "--hf",
            f"{at}/model",
            "--output",
            f"{at}/megatron",
            "--tensor-model-parallel-size",
            "4",
        ],
        "full": [*base, f"{at}/full", "--heads", f"{at}/heads.json", "--name", "org/tiny"],
        "half": [*base, f"{at}/half", "--dtype", "bfloat16"],
        "short": [*base, f"{at}/short", "--heads", f"{at}/heads.json", "--truncate"],
        "exchanged": [*again, f"{at}/full", "--output", f"{at}/exchanged", "--heads", f"{at}/others.json"],
        "copied": [*again, f"{at}/short", "--output", f"{at}/copied"],
        "exchanged deep": [*again, f"{at}/short", "--output", f"{at}/x", "--heads", f"{at}/others.json"],
        "other prompt of a copy": [*again, f"{at}/full", "--output", f"{at}/x", "--heads", f"{at}/short_prompt.json"],
        "not exported": [*again, f"{at}/model", "--output", f"{at}/x", "--heads", f"{at}/others.json"],
        "cut a copy": [*again, f"{at}/full", "--output", f"{at}/x", "--truncate"],
        "over itself": [*again, f"{at}/full", "--output", f"{at}/full", "--overwrite"],
        "tp 3": ["import-hf", "--hf", f"{at}/model", "--output", f"{at}/x", "--tensor-model-parallel-size", "3"],
        "no model": ["import-hf", "--hf", f"{at}/nowhere", "--output", f"{at}/x"],
        "family": ["import-hf", "--hf", f"{at}/mistral", "--output", f"{at}/x"],
        "no checkpoint": ["export-hf", "--checkpoint", f"{at}/model", "--base", f"{at}/model", "--output", f"{at}/x"],
        "other base": ["export-hf", "--checkpoint", f"{at}/megatron", "--base", f"{at}/other", "--output", f"{at}/x"],
        "deep heads": [*base, f"{at}/x", "--heads", f"{at}/deep.json"],
        "size": [*base, f"{at}/x", "--max-shard-size", "big"],
        "exists": [*base, f"{at}/full"],
        "file": [*base, f"{at}/heads.json", "--overwrite"],
        "base": [*base, f"{at}/model", "--overwrite"],
        "root": [*base, at, "--overwrite"],
    }
    return dict(zip(commands, run_ranks(run_commands, 1, list(commands.values()))[0], strict=True))


def test_import_and_export_say_what_they_wrote(alone, place):
    assert alone["import"][:2] == (0, f"{place}/megatron/release: qwen3, 4 layers, 8 heads in 4 groups\n")
    assert alone["full"][:2] == (0, f"{place}/full: all 4 layers, 2 heads\n")
    assert alone["short"][:2] == (0, f"{place}/short: layers 0-2 of 4, 2 heads\n")
    assert "no headrank.json (--heads adds it)" in alone["half"][1]


def test_the_exports_hold_the_models_weights(alone, place):
    expected, full, half = (tensors_of(place / name) for name in ("model", "full", "half"))
    assert set(full) == set(expected) and all(torch.equal(full[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert json.loads((place / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 'HeadRankReranker.from_pretrained("org/tiny")' in (place / "full" / "README.md").read_text()


def test_full_and_truncated_exports_rank_alike(alone, place):
    request = ("how long do fleas live", ["Fleas live two months.", "Rosin is resin.", "A host is warm."])
    full, short = (
        HeadRankReranker.from_pretrained(place / name, device="cpu", dtype="float32").rank(*request)
        for name in ("full", "short")
    )
    assert full == short


def test_an_export_is_written_again_with_other_heads_and_the_same_weights(alone, place):
    assert alone["exchanged"][:2] == (0, f"{place}/exchanged: the weights of {place}/full, 2 heads\n")
    before, after = tensors_of(place / "full"), tensors_of(place / "exchanged")
    assert set(after) == set(before) and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    about = {
        name: json.loads((place / name / "headrank.json").read_text())
        for name in ("full", "exchanged", "short", "copied")
    }
    assert about["exchanged"]["heads"]["heads"] == [[0, 1], [3, 2]] and about["full"]["heads"]["heads"] == [
        [1, 3],
        [2, 5],
    ]
    assert about["exchanged"]["training"] == about["full"]["training"] and about["copied"] == about["short"]
    assert "L3-H2" in (place / "exchanged" / "README.md").read_text()
    assert HeadRankReranker.from_pretrained(place / "exchanged", device="cpu").heads.l_max == 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "tp 3",
            "3 does not divide 8 heads, 4 key-value groups and MLP width 96; this model can be split over 1, 2, 4",
        ),
        ("no model", "nowhere: no model there"),
        ("family", "model type 'mistral' has no Megatron mapping"),
        ("no checkpoint", "no checkpoint here"),
        ("other base", "ffn is 80, but"),
        ("deep heads", "L9-H5 does not exist"),
        ("size", "--max-shard-size 'big' is not a size"),
        ("exchanged deep", "was cut to 3 layers, but a head is in layer 3; give --checkpoint"),
        ("other prompt of a copy", "chosen with another prompt"),
        ("not exported", "has no headrank.json"),
        ("cut a copy", "so --truncate has no meaning with it; give --checkpoint"),
        ("over itself", "which would be removed; choose another directory"),
        ("exists", "full: already exists; remove it, choose another or give --overwrite"),
        ("file", "heads.json: is a file; give the name of a directory"),
        ("base", "which would be removed; choose another directory"),
        ("root", "which would be removed; choose another directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_leaves_nothing(alone, place, case, words):
    code, output, errors = alone[case]
    assert (code, output) == (2, "")
    assert words in errors.splitlines()[-1]
    assert not (place / "x").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(alone, place):
    at = str(place)
    commands = [
        ["import-hf", "--hf", f"{at}/model", "--output", f"{at}/small-disk"],
        ["export-hf", "--checkpoint", f"{at}/megatron", "--base", f"{at}/model", "--output", f"{at}/small-disk/hf"],
    ]
    for code, output, errors in run_ranks(run_commands_on_a_full_disk, 1, commands, 100_000)[0]:
        assert (code, output) == (2, "")
        assert "cannot be written" in errors.splitlines()[-1] and "make room" in errors.splitlines()[-1]
    assert not [path for path in place.rglob("*") if "small-disk" in str(path) and path.is_file()]


def test_two_processes_write_the_same_model_as_one(alone, place):
    at = str(place)
    commands = [
        ["import-hf", "--hf", f"{at}/model", "--output", f"{at}/megatron-2"],
        [
            "export-hf",
            "--checkpoint",
            f"{at}/megatron-2",
            "--base",
            f"{at}/model",
            "--output",
            f"{at}/pair",
            "--max-shard-size",
            "60KB",
        ],
    ]
    for command in commands:  # each on processes of its own, as torchrun starts them
        (first,), (second,) = run_ranks(run_commands, 2, [command])
        assert (first[0], second[0]) == (0, 0)
        assert first[1] and not second[1]  # one of them speaks
    assert len(list((place / "pair").glob("*.safetensors"))) > 3
    expected, found = tensors_of(place / "model"), tensors_of(place / "pair")
    assert set(found) == set(expected) and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
