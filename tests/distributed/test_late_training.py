"""Training in the late layout: Megatron's scores are the reranker's, and loss and gradients are the same at every TP size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.reranking.late_reader import LateReader
from headrank.reranking.reader import AttentionReader
from megatron_patches.readout_weights import PARAMETER
from tests.distributed.late_ranks import late_results
from tests.distributed.launcher import run_ranks
from tests.tiny_models import SIZES, make_tiny_model
from tests.toy_training import make_toy_job

PROMPT = PromptTemplate(
    opening="<|im_start|>user\n", instruction="Query: ", use_chat_template=False, document_layout="late", branch_position=64
)
HEADS = ((3, 0), (1, 5), (0, 7), (3, 1), (1, 2))  # at TP 4 rank 3 has a head in layer 0 alone
SAME = 1e-4  # relative: of a list's deviation, of the loss, of a parameter's largest gradient
TP_SIZES = {"qwen3": [1, 2, 4], "llama": [1, 2, 4], "qwen2": [1, 2]}  # the tiny Qwen2 has two key-value groups


def late_heads(model: Path) -> HeadSet:
    readout = Readout(weights=(0.7, -1.1, 0.9, 1.3, 0.4), floor=0.1, offsets=(0.3, -0.2, 0.1, 0.0, 0.5))
    sizes = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    return HeadSet(HEADS, "readout", str(model), *sizes, prompt=PROMPT, readout=readout)


def add_teacher(folder: Path) -> None:
    """Give every document a teacher's score that goes with its grade, but one in five none."""
    lines = []
    for row in map(json.loads, (folder / "contexts.jsonl").read_text().splitlines()):
        for number, document in enumerate(row["documents"]):
            if number % 5 != 4:
                document["teacher_score"] = 2.0 * document["grade"] - 3.0 + 0.1 * number
        lines.append(json.dumps(row) + "\n")
    (folder / "contexts.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module", params=list(TP_SIZES))
def case(request, tmp_path_factory):
    """The toy job, and what every rank of a world found at each TP size."""
    place = tmp_path_factory.mktemp(f"late-{request.param}")
    job = make_toy_job(place)
    add_teacher(job.train)
    model = make_tiny_model(place / "family", request.param)
    late_heads(model).save(place / "late.json")
    sizes = TP_SIZES[request.param]
    return model, job, run_ranks(late_results, max(sizes), model, job.train, place / "late.json", sizes)


def test_scores_are_those_of_the_reranker(case) -> None:
    model, job, ranks = case
    heads = late_heads(model)
    reader = LateReader(AttentionReader.load(model), heads)
    for number, row in enumerate(map(json.loads, (job.train / "contexts.jsonl").read_text().splitlines()[:3])):
        passages = reader.encoder.encode_passages([(document["title"], document["text"]) for document in row["documents"]])
        query, expected = reader.query_vectors(reader.encoder.encode_query(row["query"])), torch.empty(len(passages))
        for indices, keys in reader.passage_keys(passages):
            expected[indices] = reader.scores(query, keys)
        for result in ranks:
            for tp, found in result.items():
                error = (found["whole"][number] - expected).abs().max() / expected.std()
                assert error < SAME, f"list {number} at TP {tp}: {error}"


def test_loss_and_gradients_do_not_depend_on_tensor_parallelism_or_recomputation(case) -> None:
    _, _, ranks = case
    expected = ranks[0][1]
    assert expected["loss"] > 0 and expected["gradients"][PARAMETER].count_nonzero() == len(HEADS)
    for result in ranks:
        for tp, found in result.items():
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=SAME, atol=0)
            torch.testing.assert_close(found["terms"], expected["terms"], rtol=SAME, atol=1e-6)
            for name, gradient in expected["gradients"].items():
                assert gradient.abs().max() > 0, name
                error = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
                assert error < SAME, f"{name} at TP {tp}: {error}"


def test_scores_against_own_passages_are_blocks_of_those_against_all(case) -> None:
    for found in case[2][0].values():
        for query, (first, stop) in enumerate(found["lists"]):
            torch.testing.assert_close(found["own"][query, first:stop], found["scores"][query, first:stop], rtol=1e-5, atol=1e-5)
            assert found["scores"][query].count_nonzero() == found["scores"].shape[1]
