"""What a first run says about itself: memory, times, a profile; and that deterministic kernels train."""

from __future__ import annotations

import gzip
import json
import re

import pytest


@pytest.fixture(scope="module")
def run(forge, toy, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    profile = (
        "--profile",
        "--use-pytorch-profiler",
        "--profile-step-start",
        "1",
        "--profile-step-end",
        "2",
        "--profile-ranks",
    )
    flags = toy.flags(
        "--save", str(place), "--train-iters", "3", "--timing-log-level", "1", "--deterministic-mode", *profile
    )
    outcome = forge.run([*flags, "--tensor-model-parallel-size", "2"], place / "log", ranks=2)
    assert outcome.codes == (0, 0), outcome.said
    return place, outcome.said


def test_memory_is_told_once_after_the_first_step_for_every_part_of_the_model(run) -> None:
    place, said = run
    lines = re.findall(
        r"\[Rank (\d)\] \(after 1 iterations\) memory \(MB\) \| resident: ([0-9.]+) \| max resident: ([0-9.]+)", said
    )
    assert [rank for rank, _, _ in lines] == ["0", "1"]
    assert all(20 < float(now) <= float(most) for _, now, most in lines)
    events = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    memory = [event for event in events if event["event"] == "memory"]
    assert len(memory) == 1 and memory[0]["iteration"] == 1
    assert memory[0]["max_resident"] == pytest.approx(max(float(most) for *_, most in lines) * 2**20, abs=2**20)


def test_megatrons_timers_are_told_with_every_log_line(run) -> None:
    _, said = run
    for name in ("forward-backward", "optimizer"):
        times = re.findall(rf"    {name} \.+: \(([0-9.]+), ([0-9.]+)\)", said)
        assert len(times) == 3 and all(0 < float(low) <= float(high) for low, high in times), name
    assert "save-checkpoint" not in said, "the last save is after the last line"


def test_the_profile_holds_the_steps_that_were_asked_for_on_every_rank(run) -> None:
    place, _ = run
    traces = sorted((place / "torch_profile").iterdir())
    assert [trace.name for trace in traces] == ["rank-0.json.gz", "rank-1.json.gz"]
    names = {event.get("name", "") for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]}
    assert any("aten::mm" in name for name in names) and any("Adam" in name for name in names)
