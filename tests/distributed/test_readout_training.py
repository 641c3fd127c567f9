"""Training runs of a readout's weights with the model: sizes agree step by step, and they resume and export at
another size.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrank.method.heads import HeadSet
from tests.distributed.test_late_training import change_lists, heads_of
from tests.distributed.test_training_runs import SAME_LOSS, events

STEPS, RATE = 4, "0.05"


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory):
    """The toy job with lists of one query, shared passages and a teacher, and heads.json of every layout."""
    change_lists(toy.train)
    place = tmp_path_factory.mktemp("readouts")
    for layout in ("late", "parallel"):
        heads_of(toy.model, layout).save(place / f"{layout}.json")
    return toy, place


def flags(job, save: Path, layout: str, *more: str) -> list[str]:
    toy, place = job
    late = ("--headrank-in-batch-weight", "0.3", "--headrank-passages-per-query", "5") if layout == "late" else ()
    trained = (
        "--headrank-train-readout",
        "--headrank-readout-lr",
        RATE,
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        "0.1",
    )
    common = (
        "--headrank-heads",
        str(place / f"{layout}.json"),
        "--lr",
        "1e-4",
        "--train-iters",
        str(STEPS),
        "--global-batch-size",
        "4",
    )
    return toy.flags(*common, *trained, *late, "--micro-batch-size", "4", "--save", str(save), *more)


@pytest.fixture(scope="module")
def alone(forge, job, tmp_path_factory):
    save = tmp_path_factory.mktemp("alone")
    outcome = forge.run(flags(job, save, "late"), save / "log")
    assert outcome.codes == (0,), outcome.said
    return save


def assert_same_run(found: Path, expected: Path) -> None:
    assert len(events(found)) == STEPS
    for row, other in zip(events(found), events(expected), strict=True):
        for name in ("total", "align", "proximal", "contrast", "grad_norm"):
            assert row[name] == pytest.approx(other[name], abs=SAME_LOSS, rel=SAME_LOSS), (row["iteration"], name)


def exported(forge, job, checkpoint: Path, output: Path) -> HeadSet:
    words = ["export-hf", "--checkpoint", str(checkpoint), "--base", str(job[0].model), "--output", str(output)]
    outcome = forge.run(words, output.parent / "log", module="headrank.commands")
    assert outcome.codes == (0,), outcome.said
    return HeadSet.from_dict(json.loads((output / "headrank.json").read_text())["heads"])


def test_data_parallel_ranks_take_the_step_of_one_rank_with_all_lists(forge, job, alone, tmp_path) -> None:
    more = ("--micro-batch-size", "2", "--use-distributed-optimizer")
    outcome = forge.run(flags(job, tmp_path, "late", *more), tmp_path / "log", ranks=2)
    assert set(outcome.codes) == {0}, outcome.said
    assert events(alone)[0]["contrast"] > 0
    assert_same_run(tmp_path, alone)


def test_trained_weights_resume_and_export_at_another_tensor_parallel_size(forge, job, alone, tmp_path) -> None:
    save = tmp_path / "run"
    outcome = forge.run(flags(job, save, "late", "--exit-interval", "2"), tmp_path / "log")
    assert outcome.codes == (0,), outcome.said
    outcome = forge.run(flags(job, save, "late", "--tensor-model-parallel-size", "2"), tmp_path / "log", ranks=2)
    assert set(outcome.codes) == {0} and "at iteration 2" in outcome.said, outcome.said
    assert_same_run(save, alone)
    start = heads_of(job[0].model, "late")
    one, two = exported(forge, job, alone, tmp_path / "one"), exported(forge, job, save, tmp_path / "two")
    assert (
        one.heads == two.heads == start.heads
        and one.readout is not None
        and two.readout is not None
        and start.readout is not None
    )
    moved = [after - before for after, before in zip(two.readout.weights, start.readout.weights, strict=True)]
    assert all(abs(value) > float(RATE) / 2 for value in moved), "Adam moves every weight by about its rate a step"
    assert two.readout.weights == pytest.approx(one.readout.weights, abs=SAME_LOSS)


def test_a_log_mass_readout_trains_in_the_parallel_layout_at_any_size(forge, job, tmp_path) -> None:
    for name, ranks, more in (("one", 1, ()), ("two", 2, ("--tensor-model-parallel-size", "2"))):
        outcome = forge.run(flags(job, tmp_path / name, "parallel", *more), tmp_path / "log", ranks=ranks)
        assert set(outcome.codes) == {0}, outcome.said
    rows = events(tmp_path / "one")
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert rows[-1]["total"] != rows[0]["total"] and rows[-1]["proximal"] > 0 == pytest.approx(
        rows[0]["proximal"], abs=1e-9
    )
