"""Training on log masses, in every layout: scores are the reranker's, loss and gradients the same at every TP and DP
size.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from megatron_patches.readout_weights import PARAMETER
from tests.distributed.late_ranks import NUM_LISTS, readout_results
from tests.distributed.launcher import run_ranks
from tests.tiny_models import SIZES, make_tiny_model
from tests.toy_training import make_toy_job

PROMPT = PromptTemplate(
    opening="<|im_start|>user\n",
    instruction="Query: ",
    use_chat_template=False,
    document_layout="late",
    branch_position=64,
)
LAYOUTS = ("late", "parallel", "sequential")
# at TP 4 rank 3 has a head in layer 0 alone, rank 1 one in layer 1, ...
HEADS = ((3, 0), (1, 5), (0, 7), (3, 1), (1, 2))
SAME = 1e-4  # relative: of a list's deviation, of the loss, of a parameter's largest gradient
# the tiny Qwen2 has two key-value groups, too few for TP 4
FAMILIES = {"qwen3": {}, "llama": {}, "qwen2": {"num_key_value_heads": 4}}
TP_SIZES = [1, 2, 4]  # of four ranks: DP 4, 2 and 1, with one, two and all four lists of the step on a rank


def heads_of(model: Path, layout: str) -> HeadSet:
    readout = Readout(weights=(0.7, -1.1, 0.9, 1.3, 0.4), floor=0.1, offsets=(0.3, -0.2, 0.1, 0.0, 0.5))
    sizes = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    prompt = dataclasses.replace(PROMPT, document_layout=layout)
    return HeadSet(HEADS, "readout", str(model), *sizes, prompt=prompt, readout=readout)


def change_lists(folder: Path) -> None:
    """Add a teacher's scores that go with the grades, but none for one in five; all lists share a passage, every
    second one the query.
    """
    rows = [json.loads(line) for line in (folder / "contexts.jsonl").read_text().splitlines()]
    for row in rows:
        row["documents"][2]["text"] = rows[0]["documents"][2]["text"]
    for number, row in enumerate(rows):
        row["query"] = rows[number % 2]["query"]
    for row in rows:
        for number, document in enumerate(row["documents"]):
            if number % 5 != 4:
                document["teacher_score"] = 2.0 * document["grade"] - 3.0 + 0.1 * number
    (folder / "contexts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request, tmp_path_factory):
    """The toy job, and what every rank of a world found at each TP size."""
    place = tmp_path_factory.mktemp(f"late-{request.param}")
    job = make_toy_job(place)
    change_lists(job.train)
    model = make_tiny_model(place / "family", request.param, **FAMILIES[request.param])
    files = {layout: place / f"{layout}.json" for layout in LAYOUTS}
    for layout, path in files.items():
        heads_of(model, layout).save(path)
    return model, job, run_ranks(readout_results, max(TP_SIZES), model, job.train, files, TP_SIZES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_reranker(case, layout) -> None:
    model, job, ranks = case
    heads = heads_of(model, layout)
    reranker = HeadRankReranker.from_reader(AttentionReader.load(model, prompt=heads.prompt, dtype="float32"), heads)
    for number, row in enumerate(map(json.loads, (job.train / "contexts.jsonl").read_text().splitlines()[:3])):
        expected = torch.from_numpy(reranker.score_batch([(row["query"], row["documents"])])[0].scores)
        for result in ranks:
            for tp, found in result.items():
                error = (found[layout]["whole"][number] - expected).abs().max() / expected.std()
                assert error < SAME, f"list {number} at TP {tp}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_depend_on_no_tensor_or_data_parallel_size_and_not_on_recomputation(case, layout) -> None:
    _, _, ranks = case
    expected = ranks[0][max(TP_SIZES)][layout]  # one data-parallel rank with all lists
    assert expected["terms"][0] > 0 and expected["gradients"][PARAMETER].count_nonzero() == len(HEADS)
    assert (expected["terms"][-1] > 0) == (layout == "late"), "the in-batch term"
    for result in ranks:
        for tp, of_size in result.items():
            for name in [name for name in of_size if name.startswith(layout)]:
                torch.testing.assert_close(of_size[name]["terms"], expected["terms"], rtol=SAME, atol=1e-6)
                for parameter, gradient in expected["gradients"].items():
                    assert gradient.abs().max() > 0, parameter
                    error = (of_size[name]["gradients"][parameter] - gradient).abs().max() / gradient.abs().max()
                    assert error < SAME, f"{parameter} of {name} at TP {tp}: {error}"


def test_a_query_meets_every_passage_of_the_step_and_known_ones_are_no_negatives(case) -> None:
    _, _, ranks = case
    everything = ranks[0][max(TP_SIZES)]["late"]
    lists = everything["samples"]  # query, passages, all passages of its list: as digests
    assert len({query for query, _, _ in lists}) < len(lists)
    expected = [
        sum(digest not in known for other, passages, _ in lists if other != query for digest in passages)
        for query, _, known in lists
    ]
    assert everything["negatives"] == expected
    assert any(
        digest in known
        for query, _, known in lists
        for other, passages, _ in lists
        if other != query
        for digest in passages
    )
    for tp in TP_SIZES:
        each = NUM_LISTS * tp // max(TP_SIZES)
        for rank, result in enumerate(ranks):
            found, first = result[tp]["late"], rank // tp * each  # tensor-parallel ranks are neighbours
            torch.testing.assert_close(
                found["scores"], everything["scores"][first : first + each], rtol=SAME, atol=1e-5
            )
            assert found["negatives"] == everything["negatives"][first : first + each]


def test_scores_against_own_passages_are_blocks_of_those_against_all(case) -> None:
    for found in (result[tp]["late"] for result in case[2] for tp in TP_SIZES):
        for query, (first, stop) in enumerate(found["lists"]):
            own, all_of_step = found["own"][query, first:stop], found["scores"][query]
            torch.testing.assert_close(
                own, all_of_step[found["first"] + first : found["first"] + stop], rtol=1e-5, atol=1e-5
            )
            assert all_of_step.count_nonzero() == len(all_of_step)
