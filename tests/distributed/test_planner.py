"""The planner against reality: resident memory of real gloo processes, FLOPs and messages counted by hand, the
paper's recipe.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headrank.method.prompt import PromptTemplate
from megatron_patches.planner.job import (
    CALIBRATION_TOKENS,
    LABEL_TOKENS,
    LATE_QUERY_TOKENS,
    OPENING_TOKENS,
    QUERY_ROWS,
    QUERY_TOKENS,
    Job,
)
from megatron_patches.planner.shapes import KNOWN_MODELS, heads_of
from megatron_patches.training.train_step import TERMS
from tests.distributed import planner_ranks
from tests.distributed.launcher import run_ranks

MEMORY_TOLERANCE = 0.10  # issue 8's bar against resident memory; 0.03 was seen
FLOPS_TOLERANCE = 0.01  # issue 8's bar against a hand count
DEPTH_TOLERANCE = 0.02  # heads of several layers are read in the last ones, so kernels differ a little; 0.011 was seen
SAME_SCORES = 1e-5  # one pass and two passes add in another order
PATIENCE = 1200  # seconds, for a busy machine
CHEAP_TABLES = ("queries",)  # a few seconds each; the others are made by the same code
PAPER_JOB = Job("Qwen3-0.6B", KNOWN_MODELS["Qwen3-0.6B"], heads_of("Qwen3-0.6B", KNOWN_MODELS["Qwen3-0.6B"]), 4, 8)
CLUSTER_JOB = dataclasses.replace(PAPER_JOB, world_size=1024, global_batch_size=256)
SHORT = dataclasses.replace(PAPER_JOB.shape, layers=9)
SHORT_JOB = dataclasses.replace(PAPER_JOB, model="short", shape=SHORT, heads=heads_of("short", SHORT, last_layer=7))
TINY_JOB = planner_ranks.cpu_job("tiny", 2)
PARALLEL = dataclasses.replace(
    TINY_JOB, heads=dataclasses.replace(TINY_JOB.heads, prompt=PromptTemplate(document_layout="parallel"))
)
LATE = planner_ranks.late_job(TINY_JOB)
JOBS: dict[str, tuple[Job, str, bool]] = {
    "tiny": (TINY_JOB, "ours", True),
    "parallel": (PARALLEL, "ours", True),
    "parallel on a GPU": (dataclasses.replace(PARALLEL, is_bf16=True, has_gpu_kernels=True), "ours", True),
    "tiny on a GPU": (dataclasses.replace(TINY_JOB, has_gpu_kernels=True), "ours", True),
    "tiny on a GPU, bf16": (dataclasses.replace(TINY_JOB, is_bf16=True, has_gpu_kernels=True), "ours", True),
    "late": (LATE, "ours", True),
    "embedded": (planner_ranks.cpu_job("embedded", 1), "ours", True),
    "paper": (PAPER_JOB, "ours", False),
    "short": (SHORT_JOB, "ours", True),
    "short by depth": (SHORT_JOB, "ours", False),
    "short literal": (SHORT_JOB, "literal", True),
    "short literal by depth": (SHORT_JOB, "literal", False),
    "1024 ranks": (CLUSTER_JOB, "ours", False),
    "recomputed": (dataclasses.replace(PAPER_JOB, is_recomputed=True), "ours", False),
}
KERNELS_A_LAYER, ACTIVATIONS_A_LAYER, WAITS_AN_UPDATE = 150, 155, 2  # ceilings; 144, 150 and 1 are counted today


@pytest.fixture(scope="module")
def predicted() -> dict[str, dict[str, Any]]:
    """All predictions, from one process that never joins a real group."""
    return dict(zip(JOBS, run_ranks(planner_ranks.predict, 1, list(JOBS.values()), timeout=PATIENCE)[0], strict=True))


def lasting(measured: dict[str, Any]) -> int:
    return sum(measured[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer", "reference"))


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("embedded", 1)])
def test_predicted_memory_is_what_real_processes_take(predicted, name: str, ranks: int) -> None:
    job = JOBS[name][0]
    spent = run_ranks(planner_ranks.spend, ranks, job, timeout=PATIENCE)[job.fullest_rank]
    assert lasting(predicted[name]) == pytest.approx(spent["lasting"], rel=MEMORY_TOLERANCE)
    assert predicted[name]["activation_bytes"] == pytest.approx(spent["activations"], rel=MEMORY_TOLERANCE)


def flops_by_hand(job: Job) -> float:
    """Matrix products of one context, forward and backward, on the fullest rank, as one would count them on paper."""
    shape, tokens, ranks = job.shape, job.sequence_tokens, job.tensor_parallel
    queries, groups = shape.heads * shape.head_dim // ranks, shape.groups * shape.head_dim // ranks
    whole_layer = shape.hidden * (queries + 2 * groups) + queries * shape.hidden + 3 * shape.hidden * shape.ffn // ranks
    last_layer = shape.hidden * (queries + groups)
    linear = 3 * 2 * tokens * (job.heads.l_max * whole_layer + last_layer)  # forward, input gradient, weight gradient
    # the causal triangle, and the calibration rows once more
    pairs = tokens * (tokens + 1) / 2 + CALIBRATION_TOKENS * tokens
    # every document over the opening and itself, masked; both branches over everything
    if job.heads.prompt.is_parallel:
        opening, document = OPENING_TOKENS + LABEL_TOKENS, job.document_tokens + LABEL_TOKENS
        pairs = (
            job.documents * document * (opening + document)
            + (QUERY_TOKENS + CALIBRATION_TOKENS) * tokens
            + opening**2 / 2
        )
    attention = job.heads.l_max * (2 + 5) * 2 * queries * pairs  # two products forward, five backward
    mine = sum(head * ranks // shape.heads == job.fullest_rank for _, head in job.heads.heads)
    rows = mine * 3 * 2 * (QUERY_ROWS + CALIBRATION_TOKENS) * tokens * shape.head_dim
    return linear + attention + rows


def late_flops_by_hand(job: Job) -> float:
    """Matrix products of one list of the late layout: every row of its own over the opening and itself, then queries
    against keys.
    """
    shape, ranks = job.shape, job.tensor_parallel
    tokens = OPENING_TOKENS + job.documents * job.document_tokens + LATE_QUERY_TOKENS
    queries, groups = shape.heads * shape.head_dim // ranks, shape.groups * shape.head_dim // ranks
    whole_layer = shape.hidden * (queries + 2 * groups) + queries * shape.hidden + 3 * shape.hidden * shape.ffn // ranks
    linear = 3 * 2 * tokens * (job.heads.l_max * whole_layer + shape.hidden * (queries + groups))
    lengths = [OPENING_TOKENS + LATE_QUERY_TOKENS, *[OPENING_TOKENS + job.document_tokens] * job.documents]
    attention = job.heads.l_max * (2 + 5) * 2 * queries * sum(length * (length + 1) / 2 for length in lengths)
    mine = sum(head * ranks // shape.heads == job.fullest_rank for _, head in job.heads.heads)
    rows = mine * 3 * 2 * QUERY_ROWS * (job.documents * job.document_tokens + OPENING_TOKENS) * shape.head_dim
    return linear + attention + rows


def test_a_late_job_costs_what_a_hand_count_says(predicted) -> None:
    assert predicted["late"]["microbatch_flops"] == pytest.approx(late_flops_by_hand(LATE), rel=FLOPS_TOLERANCE)


def test_flops_are_those_of_a_hand_count(predicted) -> None:
    assert predicted["paper"]["microbatch_flops"] == pytest.approx(flops_by_hand(PAPER_JOB), rel=FLOPS_TOLERANCE)
    assert predicted["tiny"]["microbatch_flops"] == pytest.approx(flops_by_hand(TINY_JOB), rel=FLOPS_TOLERANCE)
    assert predicted["parallel"]["microbatch_flops"] == pytest.approx(flops_by_hand(PARALLEL), rel=FLOPS_TOLERANCE)
    assert flops_by_hand(PARALLEL) < 0.8 * flops_by_hand(TINY_JOB)


def test_a_micro_batch_stays_below_its_ceilings_of_kernels_bytes_and_waits(predicted) -> None:
    """Qwen3-4B's layers at true size; more of any is a cost on every step of every run."""
    paper = predicted["paper"]
    layers = PAPER_JOB.heads.l_max
    assert paper["microbatch_kernels"] < KERNELS_A_LAYER * layers
    activation = PAPER_JOB.sequence_tokens * PAPER_JOB.shape.hidden * 2
    assert paper["microbatch_traffic"] < ACTIVATIONS_A_LAYER * layers * activation
    assert paper["microbatch_waits"] == 0, "the host never waits inside a micro-batch"
    assert paper["update_waits"] <= len(TERMS) + WAITS_AN_UPDATE, "a list of fake numbers is asked for one by one"


def test_documents_side_by_side_cost_a_gpu_no_gathers(predicted) -> None:
    side_by_side, sequential = predicted["parallel on a GPU"], predicted["tiny on a GPU, bf16"]
    assert side_by_side["microbatch_kernels"] < sequential["microbatch_kernels"], (
        "one kernel a layer, no rows to do again"
    )
    assert side_by_side["activation_bytes"] < sequential["activation_bytes"]
    # whole tiles: more than the pairs that are visible, less than all of them
    assert flops_by_hand(PARALLEL) < side_by_side["microbatch_flops"] < sequential["microbatch_flops"]


def test_in_float32_a_gpu_keeps_keys_and_values_for_every_head(predicted) -> None:
    """Its flash kernel has no float32, and the other one no groups: a copy for every head beside what is kept
    anyway.
    """
    shape, job = TINY_JOB.shape, TINY_JOB
    grouped = run_ranks(planner_ranks.with_grouped_float32, 1, dataclasses.replace(TINY_JOB, has_gpu_kernels=True))[0]
    per_layer = 2 * job.sequence_tokens * shape.heads * shape.head_dim * 4 / job.tensor_parallel
    more = predicted["tiny on a GPU"]["activation_bytes"] - grouped
    assert more == pytest.approx(job.heads.l_max * per_layer, rel=0.01)


def test_parameters_gradients_and_moments_are_what_megatron_allocates(predicted) -> None:
    from megatron_patches.training.assembly import count_parameters

    measured = predicted["paper"]
    sharded = count_parameters(PAPER_JOB.shape, PAPER_JOB.heads.l_max) / PAPER_JOB.tensor_parallel
    assert measured["num_parameters"] == pytest.approx(sharded, rel=0.001)  # norms are on every rank
    assert measured["parameter_bytes"] == pytest.approx(2 * sharded, rel=0.001)
    assert measured["gradient_bytes"] == pytest.approx(4 * sharded, rel=0.001)
    # weight and two moments, sharded
    assert measured["optimizer_bytes"] == pytest.approx(12 * sharded / PAPER_JOB.data_parallel, rel=0.01)


def test_a_micro_batch_reduces_activations_twice_a_layer_each_way_and_the_scores_once(predicted) -> None:
    messages = predicted["paper"]["microbatch_messages"]
    assert {(name, len(ranks)) for name, ranks, _ in messages} == {("all-reduce", 4)}
    activation = PAPER_JOB.sequence_tokens * PAPER_JOB.shape.hidden * 2
    of_activations = sum(count for (_, _, size), count in messages.items() if size == activation)
    depth = PAPER_JOB.heads.l_max
    # embedding, two a layer; two a layer, Q and K of the last
    assert of_activations == (1 + 2 * depth) + (2 * depth + 1)
    others = {size: count for (_, _, size), count in messages.items() if size != activation}
    assert others == {4 * PAPER_JOB.sequence_tokens: 1, 4 * PAPER_JOB.documents: 1}  # kept tokens [B, S], scores [B, N]


def test_an_update_exchanges_gradients_and_weights_once_over_data_parallel_ranks(predicted) -> None:
    for name, job in (("paper", PAPER_JOB), ("1024 ranks", CLUSTER_JOB)):
        sums: dict[tuple[str, int], float] = {}
        for (collective, ranks, size), count in predicted[name]["update_messages"].items():
            sums[collective, len(ranks)] = sums.get((collective, len(ranks)), 0) + size * count
        assert sums["reduce-scatter", job.data_parallel] == predicted[name]["gradient_bytes"]
        assert sums["all-gather", job.data_parallel] == predicted[name]["parameter_bytes"]


def test_more_data_parallel_ranks_shard_the_optimizer_and_nothing_else(predicted) -> None:
    few, many = predicted["paper"], predicted["1024 ranks"]
    assert many["optimizer_bytes"] < few["optimizer_bytes"] / 100
    for part in ("num_parameters", "parameter_bytes", "gradient_bytes"):
        assert many[part] == pytest.approx(few[part], rel=0.001)
    assert many["microbatch_flops"] == pytest.approx(few["microbatch_flops"], rel=1e-6)


@pytest.mark.parametrize("recipe", ["short", "short literal"])
def test_few_layers_extended_to_all_are_the_whole_model(predicted, recipe: str) -> None:
    whole, extended = predicted[recipe], predicted[f"{recipe} by depth"]
    for part in (
        "num_parameters",
        "parameter_bytes",
        "gradient_bytes",
        "reference_bytes",
        "microbatch_flops",
        "microbatch_messages",
    ):
        assert extended[part] == whole[part], part
    assert extended["optimizer_bytes"] == pytest.approx(whole["optimizer_bytes"], abs=1024)  # every shard is padded
    for part in ("activation_bytes", "microbatch_traffic", "update_traffic"):
        assert extended[part] == pytest.approx(whole[part], rel=DEPTH_TOLERANCE), part
    for messages in (extended["update_messages"], whole["update_messages"]):
        sent = {
            name: sum(size * count for (one, _, size), count in messages.items() if one == name)
            for name, _, _ in messages
        }
        assert sent["reduce-scatter"] == whole["gradient_bytes"] and sent["all-gather"] == whole["parameter_bytes"]


def test_the_papers_text_costs_more_in_every_respect(predicted) -> None:
    ours, literal = predicted["short"], predicted["short literal"]
    for part in (
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "microbatch_flops",
        "microbatch_traffic",
    ):
        assert literal[part] > 1.05 * ours[part], part
    assert literal["microbatch_flops"] > 2.5 * ours["microbatch_flops"]  # two passes, and two more of the reference
    assert (
        literal["reference_bytes"] == pytest.approx(literal["parameter_bytes"], rel=0.001)
        and ours["reference_bytes"] == 0
    )


def test_recomputation_trades_activations_for_a_forward_pass(predicted) -> None:
    kept, recomputed = predicted["paper"], predicted["recomputed"]
    assert recomputed["activation_bytes"] < 0.5 * kept["activation_bytes"]
    assert 1.2 < recomputed["microbatch_flops"] / kept["microbatch_flops"] < 1.4


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_passes_of_the_papers_text_give_the_scores_of_our_one_pass(ranks: int) -> None:
    small = dataclasses.replace(planner_ranks.TINY, layers=4, hidden=64, ffn=96, vocab=500)
    job = Job(
        "small",
        small,
        heads_of("small", small, last_layer=2),
        ranks,
        ranks,
        global_batch_size=1,
        documents=7,
        document_tokens=9,
        is_bf16=False,
    )
    for one, two in run_ranks(planner_ranks.score_both_ways, ranks, job):
        assert one == pytest.approx(two, abs=SAME_SCORES) and max(one) - min(one) > 100 * SAME_SCORES


TINY_NODE = (
    "--tensor-model-parallel-size",
    "3",
    "--gpus-per-node",
    "3",
    "--global-batch-size",
    "3",
    "--context-documents",
    "20",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "cluster": (
        *("--model", "Qwen3-4B", "--tensor-model-parallel-size", "8", "--nodes", "128", "--gpu", "h20"),
        *("--context-documents", "100", "--by-depth", "--json"),
    ),
    "table": ("--model", "embedded", *TINY_NODE, "--recipe", "ours", "--no-limits", "--gpu", "a100"),
    "custom": (
        *(
            "--model",
            "embedded",
            *TINY_NODE,
            "--recipe",
            "ours",
            "--no-limits",
            "--json",
            "--gpu",
            "custom",
            "--gpu-memory",
            "1",
        ),
        *("--gpu-bf16", "10", "--gpu-fp32", "5", "--gpu-memory-bandwidth", "100", "--gpu-link-bandwidth", "10"),
        *("--gpu-network-bandwidth", "1"),
    ),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the command says, from one process."""
    outcomes = run_ranks(planner_ranks.command, 1, list(COMMANDS.values()), timeout=PATIENCE)[0]
    assert [(code, errors) for code, _, errors in outcomes] == [(0, "")] * len(COMMANDS)
    return {name: said for name, (_, said, _) in zip(COMMANDS, outcomes, strict=True)}


def test_the_command_plans_a_thousand_ranks_and_names_what_breaks_first(printed) -> None:
    document = json.loads(printed["cluster"])
    ours, literal = document["plans"]
    assert (ours["recipe"], literal["recipe"], ours["world_size"], ours["data_parallel"]) == (
        "ours",
        "literal",
        1024,
        128,
    )
    assert (ours["global_batch_size"], ours["microbatches"], ours["pairs_per_step"], literal["pairs_per_step"]) == (
        128,
        1,
        2048,
        128,
    )
    assert ours["fits"] and ours["steps"] < literal["steps"] and ours["hours_at_least"] < literal["hours_at_least"] / 10
    assert (
        ours["serial_seconds"]
        >= ours["bound_seconds"]
        == max(ours[f"{part}_seconds"] for part in ("compute", "memory", "network"))
    )
    assert set(ours["sent_bytes_per_step"]) >= {
        "all-reduce over 8 in the node",
        "reduce-scatter over 128 between nodes",
    }
    assert [limit["axis"].split()[0] for limit in document["limits"]] == ["tokens", "model", "nodes"]
    assert all(limit["reason"] for limit in document["limits"])
    assert document["smallest_tensor_parallel"] in (1, 2, 4)  # TP 8 takes a seventh of the GPU


def test_the_command_prints_a_table_for_people(printed) -> None:
    assert "embedded on 3 x A100 SXM 80GB: TP 3 x DP 1, global batch 3" in printed["table"]
    rows = ["weights", "gradients", "optimizer", "activations, peak", "memory, peak", "fits"]
    rows += ["TFLOP per step", "sent per step", "lower bound"]
    assert not [
        row
        for row in [*rows, "steps an epoch", "hours an epoch, at least", "tokenised contexts"]
        if row not in printed["table"]
    ]
    assert max(map(len, printed["table"].splitlines()[1:])) <= 80


def test_given_numbers_make_a_gpu_of_ones_own(printed) -> None:
    (plan,) = json.loads(printed["custom"])["plans"]
    assert (plan["gpu"], plan["fits"]) == ("custom", False)  # 1 GiB is less than what every GPU reserves
    assert plan["compute_seconds"] > plan["flops_per_step"] / 10e12  # attention rows are float32, at half the speed
    assert plan["network_seconds"] == pytest.approx(sum(plan["sent_bytes_per_step"].values()) / 10e9)


def test_what_cannot_be_planned_is_one_line() -> None:
    model = ("--model", "Qwen3-4B")
    wrong = {
        ("--model", "Qwen3-5B"): "neither a directory",
        (*model, "--gpu", "b200"): "--gpu b200 is not one of h20, h100",
        (*model, "--gpu", "custom", "--gpu-memory", "80"): "missing: --gpu-bf16, --gpu-fp32",
        (*model, "--gpu-memory", "-1"): "--gpu-memory must be a number above 0",
        (*model, "--tensor-model-parallel-size", "3", "--gpus-per-node", "3"): "can be split over 1, 2, 4, 8",
        (
            *model,
            "--tensor-model-parallel-size",
            "8",
            "--gpus-per-node",
            "4",
        ): "8 does not divide the 4 GPUs of --nodes 1",
        (
            *model,
            "--tensor-model-parallel-size",
            "1",
            "--nodes",
            "128",
            "--global-batch-size",
            "32",
        ): "32 is not divisible",
        (*model, "--nodes", "128", "--global-batch-size", "32"): "--global-batch-size 32 cannot be split",
        (*model, "--nodes", "0"): "--nodes 0 is not a whole number of at least 1",
        (*model, "--context-documents", "many"): "--context-documents many is not a whole number",
        (*model, "--context-documents", "1000"): "Qwen3-4B has 40,960 positions",
        (*model, "--l-max", "36"): "--l-max 36",
        (*model, "--heads", "none.json", "--l-max", "3"): "--heads and --l-max contradict",
        (*model, "--queries", "100", "--pairs", "99"): "--pairs 99 is fewer than one",
    }
    outcomes = run_ranks(planner_ranks.command, 1, list(wrong), timeout=PATIENCE)[0]
    for (code, said, errors), message in zip(outcomes, wrong.values(), strict=True):
        assert code == 2 and not said and message in errors and errors.count("\n") == 1, errors


def test_the_tables_in_the_pages_are_the_planners() -> None:
    from docs.scaling_tables import DOCS, TABLES, block

    text = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    found = {name: block(name).findall(text) for name in TABLES}
    assert not [
        name for name, tables in found.items() if not tables or not all(table.startswith("| ") for table in tables)
    ]
    for name, made in run_ranks(planner_ranks.regenerate, 1, list(CHEAP_TABLES), timeout=PATIENCE)[0].items():
        assert {table.rstrip("\n") for table in found[name]} == {made}, name
