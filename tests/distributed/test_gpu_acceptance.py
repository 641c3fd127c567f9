"""The acceptance list of tests/gpu with tiny models on two CPU processes: its logic, its failures, and the report
that it writes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from tests.gpu import checks
from tests.gpu.bench import Bench
from tests.gpu.report import FORMAT, Report
from tests.gpu.test_acceptance import COMPARED, LAUNCHERS

# A minute of processor time for all; those here share their logic with the rest. HEADRANK_TEST_ACCEPTANCE=1 runs every
# one.
CHEAP = (checks.bf16_scores_are_as_near_as_hugging_faces, checks.float32_is_exact)
CHECKED = COMPARED if os.environ.get("HEADRANK_TEST_ACCEPTANCE") == "1" else CHEAP


@pytest.fixture(scope="module")
def bench(forge, toy, tmp_path_factory) -> Bench:
    def start(flags, ranks, log):
        return max(forge.run(flags, log, ranks=ranks).codes, key=abs)

    return Bench(
        tmp_path_factory.mktemp("bench"),
        start,
        (1, 2),
        ("local",),
        toy.model,
        toy.heads,
        toy.train,
        has_gpu=False,
        steps=2,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    return Report(tmp_path_factory.mktemp("report") / "gpu-report.json")


@pytest.mark.parametrize("check", CHECKED, ids=lambda check: check.__name__)
def test_a_check_holds_here_too_and_leaves_its_numbers(check, bench, report) -> None:
    with report.check(check.__name__) as facts:
        check(bench, facts)
    written = json.loads(report.path.read_text())
    assert written["format"] == FORMAT and written["machine"]["versions"]
    entry = written["checks"][check.__name__]
    assert entry["status"] == "passed" and entry["facts"]


def test_the_first_launcher_trains_ten_steps_through_its_own_command(bench, toy, report) -> None:
    (toy.model / "heads.json").write_text(toy.heads.read_text())
    launcher = next(iter(LAUNCHERS))
    with report.check(launcher) as facts:
        checks.launcher_trains(bench, facts, launcher=launcher, model=toy.model, lists=toy.train, processes=2, size=2)
    assert "--sequence-parallel" in facts["command"] and len(facts["losses"]) == checks.LAUNCHED_STEPS


def test_memory_is_set_beside_a_plan_of_the_same_length(bench, monkeypatch) -> None:
    asked = {}
    plan = dict.fromkeys(
        ("sequence_tokens", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"), 1
    )

    class Done:
        returncode, stderr = 0, ""
        stdout = json.dumps({"plans": [{**plan, "peak_bytes": 2 * 10**9, "serial_seconds": 1.0}]})

    def ran(command, **_):
        asked.update(itertools.pairwise(command))
        return Done

    monkeypatch.setattr(checks.subprocess, "run", ran)
    facts: dict = {}
    bench = dataclasses.replace(bench, place=bench.place / "memory")
    bench.place.mkdir()
    model = bench.model
    (model / "heads.json").write_text(bench.heads.read_text())
    checks.memory_is_what_the_planner_says(bench, facts, model=model, name="Qwen3-4B", lists=bench.lists, documents=8)
    assert int(asked["--context-documents"]) == 8 and asked["--tensor-model-parallel-size"] == "2"
    whole = 8 * (int(asked["--document-tokens"]) + checks.LABEL_TOKENS) + checks.OPENING_TOKENS
    assert abs(whole + checks.QUERY_TOKENS + checks.CALIBRATION_TOKENS - facts["tokens"]) <= 4
    assert facts["ratio"] == pytest.approx(facts["memory"]["max_resident"] / 2e9)


def test_losses_that_differ_and_runs_that_end_badly_fail_and_are_in_the_report(bench, report) -> None:
    with pytest.raises(AssertionError, match="b differs from a by 1.00e-01"):
        checks.same({"a": [1.0, 2.0], "b": [1.1, 2.0]}, 0.05)
    with pytest.raises(AssertionError, match="nan"):
        checks.same({"a": [float("nan")], "b": [1.0]}, 0.05)
    with pytest.raises(AssertionError, match="exit code 2"):
        train_at_an_impossible_size(bench, report)
    entry = json.loads(report.path.read_text())["checks"]["broken"]
    assert entry["status"] == "failed" and "does not divide" in entry["error"] and entry["facts"] == {"before": 1}


def test_an_error_is_measured_against_the_spread_of_the_scores() -> None:
    exact = {"a": np.array([1.0, 3.0])}
    assert checks.error({"a": np.array([1.5, 2.5])}, exact) == pytest.approx(0.5)


def train_at_an_impossible_size(bench, report) -> None:
    with report.check("broken") as facts:
        facts["before"] = 1
        bench.train("broken", "--tensor-model-parallel-size", "3", ranks=2)
