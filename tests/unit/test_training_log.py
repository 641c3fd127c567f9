"""What a run says, and how held-out quality is measured: Megatron's field order, signed JSON lines, NDCG as
trec_eval has it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrank.errors import InputError
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import config_from
from megatron_patches.training.exits import ExitDecision
from megatron_patches.training.held_out import evaluate, list_ndcg, preference_accuracy
from megatron_patches.training.training_log import MetricsWriter, iteration_line

REQUIRED = [
    "--headrank-model",
    "m",
    "--headrank-heads",
    "h",
    "--train-data-path",
    "d",
    "--lr",
    "1e-5",
    "--train-iters",
    "9",
]


@pytest.fixture
def config(tmp_path):
    return config_from(parse_arguments([*REQUIRED, "--save", str(tmp_path / "run")]), 1)


def test_the_line_has_megatrons_fields_in_megatrons_order(config):
    line = iteration_line(
        3,
        config,
        consumed=6,
        milliseconds=12.34,
        learning_rate=1e-5,
        terms={"total": -0.5, "accuracy": 0.25},
        grad_norm=1.5,
        skipped=1,
        nans=2,
    )
    names = [part.split(":")[0].strip() for part in line.split("|")[1:-1]]
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+\] iteration        3/       9 \|", line)
    assert names == [
        *(
            "consumed samples",
            "elapsed time per iteration (ms)",
            "learning rate",
            "global batch size",
            "headrank loss",
            "preference accuracy",
        ),
        *("loss scale", "grad norm", "number of skipped iterations", "number of nan iterations"),
    ]
    assert "headrank loss: -5.000000E-01" in line, "negative values are shown, not dropped"


def rows(config) -> list[dict]:
    with open(f"{config.save}/metrics.jsonl") as stream:
        return [json.loads(line) for line in stream]


def test_events_of_steps_that_will_be_done_again_are_cut_off(config):
    writer = MetricsWriter(config, 0, is_writer=True)
    for iteration in (1, 2, 3):
        writer.write("train", iteration, {"total": -1.0 * iteration})
    with open(f"{config.save}/metrics.jsonl", "a") as stream:
        stream.write('{"event": "train", "iter')  # torn by a kill
    MetricsWriter(config, 2, is_writer=True)
    assert [row["iteration"] for row in rows(config)] == [1, 2]
    MetricsWriter(config, 0, is_writer=True)
    assert rows(config) == []


@pytest.mark.parametrize(
    "line", [b"[]", b"5", b"{}", b'{"iteration": "1"}', b'{"iteration": true}', b'{"iteration": 1.5}', b'"\xff"']
)
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_damaged_line_is_named_and_nothing_is_rewritten(config, line, is_writer):
    MetricsWriter(config, 0, is_writer=True).write("train", 1, {})
    with open(f"{config.save}/metrics.jsonl", "ab") as stream:
        stream.write(line + b"\n")
    with pytest.raises(InputError, match=r"metrics.jsonl:2: .*delete the line"):
        MetricsWriter(config, 0, is_writer=is_writer)
    with open(f"{config.save}/metrics.jsonl", "rb") as stream:
        assert stream.read().endswith(line + b"\n")


def test_a_folder_where_the_log_belongs_is_refused(config, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(InputError, match="metrics.jsonl: a folder"):
        MetricsWriter(config, 0, is_writer=True)


def test_other_ranks_write_nothing(config, tmp_path):
    MetricsWriter(config, 0, is_writer=False).write("train", 1, {"total": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "change"), [("wandb", {"wandb_project": "p"}), ("torch.utils.tensorboard", {"tensorboard_dir": "t"})]
)
def test_a_missing_optional_package_is_named(config, monkeypatch, module, change):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match="pip install"):
        MetricsWriter(replace(config, **change), 0, is_writer=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_order_nothing(bad):
    scores, grades = np.array([0.3, bad, 0.1]), np.array([0, 2, 1])
    assert np.isnan(list_ndcg(scores, grades)) and np.isnan(preference_accuracy(scores, np.array([[1, 0]])))
    sample = SimpleNamespace(grades=grades, pairs=np.array([[1, 0]]), teacher=None)
    measured = evaluate([sample, sample], lambda _: scores)
    assert np.isnan(measured["ndcg@10"]) and np.isnan(measured["preference_accuracy"])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30))
def test_ndcg_is_that_of_trec_eval(seed, count):
    import ir_measures

    rng = np.random.default_rng(seed)
    grades, scores = rng.integers(-1, 4, count), rng.permutation(count).astype(np.float64)
    judged = {"q": {str(i): int(grade) for i, grade in enumerate(grades) if grade >= 0}}
    run = {"q": {str(i): float(score) for i, score in enumerate(scores)}}
    if not judged["q"] or max(grades) <= 0:
        assert list_ndcg(scores, grades) == 0.0
        return
    expected = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], judged, run)[ir_measures.nDCG @ 10]
    assert list_ndcg(scores, grades) == pytest.approx(expected, abs=1e-9)


def test_preference_accuracy_counts_a_tie_as_half():
    assert preference_accuracy(np.array([2.0, 1.0, 1.0]), np.array([[0, 1], [1, 2], [2, 0], [0, 2]])) == 2.5 / 4


class FakeSample:
    def __init__(self, number: int) -> None:
        self.grades, self.pairs, self.number = np.array([1, 0, number % 2]), np.array([[0, 1]]), number
        self.teacher = np.array([0.5, np.nan, -1.0], np.float32) if number % 3 else None


def test_ranks_together_measure_what_one_rank_measures():
    samples = [FakeSample(number) for number in range(7)]

    def score(sample: FakeSample) -> np.ndarray:
        return np.random.default_rng(sample.number).normal(size=3)

    alone = evaluate(samples, score)
    sums = []
    for rank in range(3):
        evaluate(samples, score, rank=rank, world_size=3, reduce_sum=lambda mine: sums.append(mine) or np.ones((3, 2)))
    together = evaluate([], score, reduce_sum=lambda _: np.sum(sums, axis=0))
    assert together == pytest.approx(alone) and 0 < alone["teacher_accuracy"] < 1


def test_intervals_end_a_run(config, monkeypatch):
    import torch

    monkeypatch.setattr("megatron_patches.training.exits.largest_on_any_rank", lambda flags: flags)
    decision = ExitDecision(replace(config, exit_duration_in_mins=5, exit_interval=4), torch.device("cpu"))
    assert decision.reason(3) is None and "at iteration 4" in decision.reason(4)


def test_minutes_count_from_the_start_of_the_program_not_of_the_loop(config, monkeypatch):
    import torch

    monkeypatch.setattr("megatron_patches.training.exits.largest_on_any_rank", lambda flags: flags)
    started = time.monotonic() - 6 * 60
    decision = ExitDecision(replace(config, exit_duration_in_mins=5), torch.device("cpu"), started)
    assert "after 6.0 minutes" in decision.reason(3)
