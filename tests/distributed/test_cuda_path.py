"""The path of a GPU node on a CPU: where weights are made, and Transformer Engine's layers, which a stand-in with
its signatures plays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT, free_port, rank_environment

PATIENCE = float(os.environ.get("HEADRANK_RUN_LIMIT", "400"))  # seconds for all runs of a fixture
SAME_LOSS = 2e-5  # float32, two orders of summation
SAME_BF16 = 0.02  # bfloat16 rounds to three digits, and each kind of layer elsewhere
SAME_FP8 = 0.2  # a tiny model with large weights; what it does to a real one is not known
SAME_SIZE = 0.1  # two bfloat16 sums of two halves, then steps of a large rate: 0.054 was seen
SAME_RESUMED = 1e-6


def answers(what: str, output, *toy_flags: str, ranks: int = 1, stand_ins: str = "stand_ins"):
    """What tests/distributed/cuda_path.py found in processes that import the stand-ins."""
    environment = {**QUIET_ENVIRONMENT, "PATH": "/usr/bin:/bin", "HOME": str(output.parent)}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / stand_ins}"
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.cuda_path", what, str(output), *toy_flags]
    port = free_port()
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | rank_environment(rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=PATIENCE)[0].decode(errors="replace")[-4000:] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return answers("places", tmp_path_factory.mktemp("places") / "found.json")


@pytest.fixture(scope="module")
def losses(toy, tmp_path_factory):
    return answers(
        "train", tmp_path_factory.mktemp("trained") / "found.json", *toy.flags("--global-batch-size", "2"), ranks=2
    )


@pytest.mark.parametrize("layers", ["local", "engine"])
def test_every_weight_and_buffer_is_made_on_the_gpu(places, layers):
    assert len(places[layers]) > 15
    assert {name: device for name, (device, _) in places[layers].items() if device != "cuda:0"} == {}


def test_without_transformer_engine_all_weights_have_the_models_type(places):
    kinds = {name: kind for name, (_, kind) in places["local"].items() if name != "inverse frequencies"}
    assert {name: kind for name, kind in kinds.items() if kind != "torch.bfloat16"} == {}


def test_in_float32_both_kinds_of_layers_give_the_same_losses_and_the_fused_attention_is_never_asked(losses):
    # the stand-in's attention raises on float32
    assert losses["engine fp32"] == pytest.approx(losses["local fp32"], rel=SAME_LOSS)
    assert len(losses["local fp32"]) == 4 and len(set(losses["local fp32"])) == 4


def test_in_bfloat16_both_kinds_of_layers_give_nearly_the_same_losses(losses):
    # here without the fused rotary kernel and without gradients added inside the product
    assert losses["engine bf16, not split"] == pytest.approx(losses["local bf16"], rel=SAME_BF16)
    assert losses["engine bf16"] != losses["local fp32"]


def test_fused_kernels_round_less_often_and_stay_nearer_to_float32(losses):
    assert losses["engine bf16"] == pytest.approx(losses["local fp32"], rel=SAME_BF16)
    assert losses["engine bf16"] != losses["engine bf16, not split"]


def test_in_fp8_products_are_rounded_and_losses_stay_near(losses):
    assert losses["engine fp8"] != losses["engine bf16"]
    assert losses["engine fp8"] == pytest.approx(losses["engine bf16"], rel=SAME_FP8)


def test_with_the_fused_optimizer_a_run_resumes_where_it_stopped(losses):
    assert losses["engine bf16, resumed"] == pytest.approx(losses["engine bf16"], rel=SAME_RESUMED)


def test_with_the_fused_optimizer_a_run_resumes_at_another_tensor_parallel_size(losses):
    assert losses["engine bf16, resumed without tensor parallelism"][:2] == losses["engine bf16"][:2]
    assert losses["engine bf16, resumed without tensor parallelism"] == pytest.approx(
        losses["engine bf16"], rel=SAME_SIZE
    )


def test_where_transformer_engine_is_absent_apex_takes_the_steps_and_a_run_resumes(losses, toy, tmp_path):
    found = answers(
        "apex", tmp_path / "found.json", *toy.flags("--global-batch-size", "2"), ranks=2, stand_ins="stand_ins_apex"
    )
    assert found["steps"] >= 4 and len(found["whole"]) == 4
    assert found["whole"] == pytest.approx(losses["local bf16"], rel=SAME_BF16)
    assert found["resumed"] == pytest.approx(found["whole"], rel=SAME_RESUMED)
