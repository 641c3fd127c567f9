"""The planner's arithmetic without a model: GPUs, wire bytes, rooflines, steps and hours, known shapes, assumed
heads.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrank.errors import InputError
from megatron_patches.planner.gpus import GIB, GPUS, Gpu, find_gpu, is_inside_node, wire_bytes
from megatron_patches.planner.job import Job
from megatron_patches.planner.measure import Measurement
from megatron_patches.planner.meter import Costs, Kernel, Message
from megatron_patches.planner.plan import Data, Plan
from megatron_patches.planner.shapes import KNOWN_MODELS, PAPER_HEADS, heads_of, shape_of

ROUND = Gpu(
    "round",
    100 * GIB,
    bf16_flops=1e12,
    fp32_flops=1e11,
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    network_bandwidth=1e7,
)


def test_a_ring_all_reduce_sends_every_byte_nearly_twice_and_a_gather_once() -> None:
    assert wire_bytes("all-reduce", 800, 8) == 2 * 800 * 7 / 8
    assert wire_bytes("all-gather", 800, 8) == wire_bytes("reduce-scatter", 800, 8) == 700
    assert wire_bytes("broadcast", 800, 8) == 800
    assert wire_bytes("all-reduce", 800, 1) == 0


@given(st.integers(2, 4096), st.integers(1, 10**9))
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(size: int, message: int) -> None:
    parts = wire_bytes("reduce-scatter", message, size) + wire_bytes("all-gather", message, size)
    assert wire_bytes("all-reduce", message, size) == pytest.approx(parts)


def test_ranks_are_in_one_node_when_their_blocks_of_eight_agree() -> None:
    assert is_inside_node((8, 9, 15), 8) and not is_inside_node((7, 8), 8)


def test_a_given_number_replaces_the_gpus_own_and_custom_needs_all() -> None:
    assert find_gpu("H20").bf16_flops == 148e12
    assert find_gpu("h100", link_bandwidth=1e9).link_bandwidth == 1e9
    assert set(GPUS) == {"h20", "h100", "h800", "a100", "l40s", "mi300x"}
    with pytest.raises(InputError, match="not one of"):
        find_gpu("b200")
    with pytest.raises(
        InputError,
        match="missing: --gpu-memory, --gpu-fp32, --gpu-memory-bandwidth, --gpu-link-bandwidth, --gpu-network",
    ):
        find_gpu("custom", bf16_flops=1e12)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        for name in ("h20", "custom"):
            with pytest.raises(InputError, match="^--gpu-link-bandwidth must be a number above 0$"):
                find_gpu(name, link_bandwidth=wrong)
    numbers = {field.name: 1.0 for field in dataclasses.fields(Gpu) if field.name != "name"}
    assert find_gpu("custom", **numbers).memory_bandwidth == 1.0


def test_mixed_costs_are_linear() -> None:
    one = Costs()
    one.kernels[Kernel(10, torch.bfloat16, 4)] += 2
    one.messages[Message("all-reduce", (0, 1), 8)] += 1
    mixed = Costs.mix([(3.0, one), (-1.0, one)])
    assert (mixed.flops, mixed.traffic_bytes, mixed.num_kernels) == (40, 16, 4)
    assert mixed.messages == {Message("all-reduce", (0, 1), 8): 2.0}


def plan_of(microbatch: Costs, update: Costs, recipe: str = "ours", **job_changes: object) -> Plan:
    shape = KNOWN_MODELS["Qwen3-0.6B"]
    job = Job("Qwen3-0.6B", shape, heads_of("Qwen3-0.6B", shape), 4, 16, global_batch_size=32)
    measured = Measurement(1, 10 * GIB, 20 * GIB, 5 * GIB, 0, 30 * GIB, microbatch, update)
    return Plan(
        dataclasses.replace(job, **job_changes), recipe, ROUND, 8, Data(num_contexts=10, num_pairs=1000), measured
    )


def test_rooflines_by_hand() -> None:
    microbatch, update = Costs(), Costs()
    microbatch.kernels[Kernel(10**12, torch.bfloat16, 10**8)] += 1  # 1 s of compute, 0.1 s of memory
    microbatch.kernels[Kernel(10**11, torch.float32, 2 * 10**9)] += 1  # 1 s of compute, 2 s of memory
    microbatch.messages[Message("all-reduce", (0, 1, 2, 3), 10**8)] += 1  # 1.5 s inside the node
    update.messages[Message("reduce-scatter", (0, 4, 8, 12), 10**7)] += 1  # 0.75 s between nodes
    plan = plan_of(microbatch, update)
    assert plan.job.num_microbatches == 8
    assert plan.step.compute == pytest.approx(16)
    assert plan.step.memory == pytest.approx(16.8)
    assert plan.step.network == pytest.approx(8 * 1.5 + 0.75)
    assert plan.step.bound == plan.step.memory and plan.step.bound_by == "memory"
    assert plan.step.serial == pytest.approx(8 * (1 + 2) + plan.step.network)
    assert plan.microbatch.serial == pytest.approx(1 + 2 + 1.5)
    assert plan.traffic_by_collective() == {
        "all-reduce over 4 in the node": pytest.approx(8 * 1.5e8),
        "reduce-scatter over 4 between nodes": pytest.approx(7.5e6),
    }


def test_steps_are_pairs_over_the_batch_for_the_paper_and_groups_over_the_batch_for_ours() -> None:
    costs = Costs()
    costs.kernels[Kernel(10**12, torch.bfloat16, 1)] += 1
    assert plan_of(costs, Costs(), "literal").num_steps == 32  # 1000 / 32
    assert plan_of(costs, Costs(), pairs_per_context=1).num_steps == 32
    ours = plan_of(costs, Costs(), pairs_per_context=16)
    assert (ours.samples_per_epoch, ours.num_steps) == (70, 3)  # 10 contexts of 100 pairs: 7 groups each
    # ceil(10 / 4) contexts a rank of 1 s each, forward only: 2 of 7 attention products, 2 of 9 when recomputed
    assert ours.reference_seconds("bound") == pytest.approx(3 * 2 / 7)
    assert plan_of(costs, Costs(), is_recomputed=True).reference_seconds("bound") == pytest.approx(3 * 2 / 9)
    assert ours.hours("bound") == pytest.approx((3 * 8 + 6 / 7) / 3600)
    assert plan_of(costs, Costs(), "literal").hours("bound") == pytest.approx(32 * 8 / 3600)


def test_a_job_fits_until_its_peak_passes_what_is_usable() -> None:
    plan = plan_of(Costs(), Costs())
    assert plan.measured.peak_bytes == 65 * GIB and plan.usable_bytes == 93 * GIB and plan.fits
    small = dataclasses.replace(plan, gpu=dataclasses.replace(ROUND, memory_bytes=70 * GIB))
    assert not small.fits


def test_the_global_batch_follows_the_ranks_only_where_none_was_asked_for() -> None:
    job = dataclasses.replace(plan_of(Costs(), Costs()).job, world_size=1024)
    sizes = {one.tensor_parallel: one.global_batch_size for one in job.possible_sizes(is_batch_free=True)}
    assert sizes == {1: 1024, 2: 512, 4: 256, 8: 128}
    assert job.possible_sizes() == []
    node = dataclasses.replace(job, world_size=8)
    assert [one.tensor_parallel for one in node.possible_sizes()] == [1, 2, 4, 8]
    assert {one.global_batch_size for one in node.possible_sizes(is_batch_free=True)} == {32}
    odd = dataclasses.replace(node, world_size=6)
    assert [(one.tensor_parallel, one.global_batch_size) for one in odd.possible_sizes(is_batch_free=True)] == [
        (1, 36),
        (2, 33),
    ]


def test_nodes_stop_paying_at_the_batch_or_where_the_exchange_takes_longer_than_the_passes() -> None:
    from megatron_patches.planner.limits import node_limit

    slow, fast = Costs(), Costs()
    slow.kernels[Kernel(10**18, torch.bfloat16, 1)] += 1
    fast.kernels[Kernel(10**15, torch.bfloat16, 1)] += 1  # 1,000 s; the exchange of 30 GiB takes 3,221 s
    by_batch, by_network = node_limit(plan_of(slow, Costs())), node_limit(plan_of(fast, Costs()))
    assert by_batch.value == 16 and "global batch of 32" in by_batch.reason  # 32 ranks of 4 GPUs, 8 a node
    assert by_network.value == int(32 * 1000 / 3221 / 2) and "30.0 GiB" in by_network.reason


def test_only_tensor_parallel_sizes_in_doubt_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_patches.planner import limits as planner_limits

    plan = plan_of(Costs(), Costs(), world_size=8, tensor_parallel=8)  # 65 GiB, 30 of them activations
    built = []

    def measured(job: Job, recipe: str) -> Measurement:
        built.append(job.tensor_parallel)
        return dataclasses.replace(plan.measured, activation_bytes=(30 if job.tensor_parallel > 2 else 300) * GIB)

    def search(gigabytes: float) -> tuple[int | None, list[int]]:
        built.clear()
        gpu = dataclasses.replace(ROUND, memory_bytes=(gigabytes + 2) / 0.95 * GIB)  # so many are usable
        return planner_limits.smallest_tensor_parallel(dataclasses.replace(plan, gpu=gpu)), list(built)

    monkeypatch.setattr(planner_limits, "measure_by_depth", measured)
    assert search(520) == (1, [])  # eight times as much would still fit
    assert search(131) == (4, [2])  # 130 GiB at the most at TP 4; TP 2 must be tried and is too large
    assert search(93) == (4, [4, 2])  # 130 at the most: in doubt
    assert search(64) == (None, [])  # TP 8 is too large, so all are


def test_the_store_of_contexts_is_as_large_as_planned(tmp_path) -> None:
    from transformers import AutoTokenizer

    from data_tools.token_cache import context_bytes
    from data_tools.training_set import TrainingSet
    from headrank.method.prompt import PromptTemplate
    from headrank.method.spans import PromptEncoder
    from tests.toy_training import make_toy_job

    job = make_toy_job(tmp_path, num_queries=6, num_documents=8)
    made = TrainingSet(
        job.train, PromptEncoder(AutoTokenizer.from_pretrained(job.model), PromptTemplate()), permutations=2
    )
    cache = made.cache
    on_disk = sum(file.stat().st_size for file in cache.folder.glob("*.bin"))
    each = context_bytes(len(cache.tokens) / 6 / 2, 8, made.num_pairs / 6, len(cache.names) / 6, num_orders=2)
    assert on_disk == pytest.approx(6 * each + 16)  # two arrays of starts have one entry more


def test_the_paper_s_models_have_their_published_sizes_and_heads() -> None:
    from megatron_patches.training.assembly import count_parameters

    millions = {
        "Qwen3-0.6B": 596,
        "Qwen3-1.7B": 1721,
        "Qwen3-4B": 4022,
        "Qwen3-8B": 8191,
        "Qwen3-14B": 14768,
        "Qwen3-32B": 32762,
    }
    assert {name: round(count_parameters(KNOWN_MODELS[name]) / 1e6) for name in millions} == millions
    assert {name: max(layer for layer, _ in heads) for name, heads in PAPER_HEADS.items()} == {
        "Qwen3-0.6B": 21,
        "Qwen3-1.7B": 19,
        "Qwen3-4B": 24,
    }
    assert shape_of("qwen/qwen3-4b") is KNOWN_MODELS["Qwen3-4B"]
    with pytest.raises(InputError, match="Qwen3-0.6B"):
        shape_of("Qwen3-5B")


def test_a_model_directory_gives_its_own_shape(tiny_model) -> None:
    shape = shape_of(str(tiny_model("qwen3")))
    assert (shape.layers, shape.heads, shape.groups) == (4, 8, 4)


def test_the_embedded_models_known_shape_is_its_real_one(embedded_model) -> None:
    assert shape_of(str(embedded_model)) == KNOWN_MODELS["embedded"]


@pytest.mark.parametrize("name", ["Qwen3-8B", "embedded"])
def test_assumed_heads_are_distinct_and_end_at_the_layer_asked_for(name: str) -> None:
    shape = KNOWN_MODELS[name]
    heads = heads_of(name, shape, last_layer=12, num_heads=8)
    assert heads.l_max == 12 and len(set(heads.heads)) == 8
    assert heads_of(name, shape).l_max == round(0.7 * (shape.layers - 1))
    with pytest.raises(InputError, match="`l_max`"):
        heads_of(name, shape, last_layer=shape.layers)
