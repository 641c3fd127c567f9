"""Models with experts (Qwen3-MoE): converted both ways, trained with the experts given out over ranks, resumed,
exported.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.toy_training import make_toy_job

SAME_LOSS = 2e-5  # float32, other orders of summation
SAME_SCORE = 2e-5
# ranks, tensor-parallel size, expert-parallel size
SPLITS = {"alone": (1, 1, 1), "experts": (2, 1, 2), "both": (2, 2, 2)}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_job(tmp_path_factory.mktemp("experts"), family="qwen3_moe")


def flags_of(split: str) -> list[str]:
    _, tensors, experts = SPLITS[split]
    more = ["--sequence-parallel"] if tensors > 1 else []
    return ["--tensor-model-parallel-size", str(tensors), "--expert-model-parallel-size", str(experts), *more]


def train(forge, toy, save, split, *more) -> list[float]:
    flags = toy.flags(
        "--global-batch-size", "2", "--train-iters", "2", "--lr-decay-style", "constant", "--save", str(save)
    )
    outcome = forge.run(
        [*flags, *flags_of(split), *more], save.with_name(f"{save.name}-{split}.log"), ranks=SPLITS[split][0]
    )
    assert set(outcome.codes) == {0}, outcome.said[-5000:]
    events = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [event["total"] for event in events if event["event"] == "train"]


@pytest.fixture(scope="module")
def runs(forge, toy, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    found = {
        split: train(forge, toy, place / split, split, "--use-distributed-optimizer")
        for split in ("alone", "experts", "both")
    }
    train(forge, toy, place / "resumed", "experts", "--use-distributed-optimizer", "--exit-interval", "1")
    found["resumed"] = train(forge, toy, place / "resumed", "both", "--use-distributed-optimizer")
    return place, found


@pytest.mark.parametrize("split", ["experts", "both", "resumed"])
def test_losses_are_the_same_however_experts_and_tensors_are_split(runs, split) -> None:
    _, losses = runs
    assert len(set(losses["alone"])) == 2
    assert losses[split] == pytest.approx(losses["alone"], rel=SAME_LOSS)


def test_scores_are_those_of_transformers(runs, toy) -> None:
    from headrank import HeadRankReranker

    place, _ = runs
    reranker = HeadRankReranker.from_pretrained(str(toy.model), heads=str(toy.heads), device="cpu")
    lists = {row["context_id"]: row for row in map(json.loads, (toy.train / "contexts.jsonl").read_text().splitlines())}
    rows = [json.loads(line) for line in (place / "both" / "reference_scores.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == 2  # the lists that two steps saw
    for row in rows:
        documents = [document["text"] for document in lists[row["context_id"]]["documents"]]
        expected = reranker.score(lists[row["context_id"]]["query"], documents)
        assert np.abs(np.array(row["scores"]) - expected).max() < SAME_SCORE


def test_a_model_survives_the_way_to_megatron_and_back(forge, toy, tmp_path) -> None:
    command = "headrank.commands"
    imported = ["import-hf", "--hf", str(toy.model), "--output", str(tmp_path / "megatron")]
    exported = [
        "export-hf",
        "--checkpoint",
        str(tmp_path / "megatron"),
        "--base",
        str(toy.model),
        "--output",
        str(tmp_path / "hf"),
    ]
    for words in (imported, exported):
        outcome = forge.run(words, tmp_path / f"{words[0]}.log", module=command)
        assert outcome.codes == (0,), outcome.said
    before, after = load_file(toy.model / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert any(".experts." in name for name in before)
    for name, tensor in before.items():
        if not name.startswith("lm_head"):
            assert tensor.equal(after[name]), name


def test_what_was_trained_with_experts_on_two_ranks_is_exported_whole(forge, runs, toy, tmp_path) -> None:
    place, _ = runs
    found = {}
    for split in ("alone", "experts"):
        output = tmp_path / split
        words = ["export-hf", "--checkpoint", str(place / split), "--base", str(toy.model), "--output", str(output)]
        outcome = forge.run(words, tmp_path / f"{split}.log", module="headrank.commands")
        assert outcome.codes == (0,), outcome.said
        found[split] = load_file(output / "model.safetensors")
    base = load_file(toy.model / "model.safetensors")
    names = [name for name in base if ".layers.1.mlp.experts." in name]
    assert names and any(not base[name].equal(found["experts"][name]) for name in names), "experts were trained"
    for name, tensor in found["alone"].items():
        assert (tensor - found["experts"][name]).abs().max() < 1e-4, name


def test_an_optimizer_of_experts_apart_does_not_go_on_with_experts_together(forge, runs, toy, tmp_path) -> None:
    place, _ = runs
    outcome = forge.run(
        toy.flags("--load", str(place / "experts"), "--use-distributed-optimizer", "--train-iters", "3"),
        tmp_path / "log",
    )
    assert outcome.codes == (2,) and "give 2, or go on with a fresh optimizer: --no-load-optim" in outcome.said


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        (["--tensor-model-parallel-size", "2"], 2, "needs --sequence-parallel; add it"),
        (["--expert-model-parallel-size", "3"], 3, "--expert-model-parallel-size 3 does not divide the 4 experts"),
        (["--headrank-lora-rank", "4"], 1, "adapters of models with experts"),
    ],
)
def test_what_experts_do_not_allow_is_one_line(forge, toy, tmp_path, flags, ranks, words) -> None:
    outcome = forge.run(toy.flags("--train-iters", "1", *flags), tmp_path / "log", ranks=ranks)
    assert set(outcome.codes) == {2} and words in outcome.said
