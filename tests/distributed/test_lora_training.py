"""Training runs of adapters: sizes agree step by step, checkpoints resume at another size, the base stays as it was."""

from __future__ import annotations

import json

import pytest

from tests.distributed.test_training_runs import SAME_LOSS, events

LORA = ("--headrank-lora-rank", "4", "--lr", "1e-2", "--global-batch-size", "2")
STEPS = 4


def flags(toy, save, *more: str, iterations: int = STEPS) -> list[str]:
    return toy.flags(
        *LORA, "--train-iters", str(iterations), "--lr-decay-style", "constant", "--save", str(save), *more
    )


@pytest.fixture(scope="module")
def alone(forge, toy, tmp_path_factory):
    save = tmp_path_factory.mktemp("alone")
    outcome = forge.run(flags(toy, save, "--save-interval", "2"), save / "log")
    assert outcome.codes == (0,), outcome.said
    return save


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        (
            4,
            (
                "--tensor-model-parallel-size",
                "2",
                "--use-distributed-optimizer",
                "--overlap-grad-reduce",
                "--overlap-param-gather",
            ),
        ),
        (1, ("--headrank-full-depth",)),
    ],
    ids=["tp2-sequence", "tp2-dp2-overlap", "full-depth"],
)
def test_losses_and_norms_agree_step_by_step_whatever_the_sizes(forge, toy, alone, tmp_path, ranks, more):
    outcome = forge.run(flags(toy, tmp_path, *more), tmp_path / "log", ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.said
    for row, other in zip(events(tmp_path), events(alone), strict=True):
        for name in ("total", "align", "grad_norm"):
            assert row[name] == pytest.approx(other[name], abs=SAME_LOSS, rel=SAME_LOSS), (row["iteration"], name)
    assert events(alone)[-1]["total"] != events(alone)[0]["total"]


def test_a_run_resumes_at_another_tensor_parallel_size_and_refuses_other_adapters(forge, toy, alone, tmp_path):
    save = tmp_path / "run"
    outcome = forge.run(flags(toy, save, "--save-interval", "2", "--exit-interval", "2"), tmp_path / "log")
    assert outcome.codes == (0,), outcome.said
    for change, words in (
        (("--headrank-lora-rank", "8"), "train them with --headrank-lora-rank 4 --headrank-lora-alpha 8"),
        (("--headrank-lora-rank", "0"), "holds adapters"),
    ):
        outcome = forge.run(flags(toy, save, *change), tmp_path / "log")
        assert outcome.codes == (2,) and words in outcome.said, outcome.said
    outcome = forge.run(flags(toy, save, "--tensor-model-parallel-size", "2"), tmp_path / "log", ranks=2)
    assert set(outcome.codes) == {0}, outcome.said
    for row, other in zip(events(save), events(alone), strict=True):
        assert row["total"] == pytest.approx(other["total"], abs=SAME_LOSS, rel=SAME_LOSS), row["iteration"]


def test_only_adapters_have_optimizer_state(alone):
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(str(alone / f"iter_{STEPS:07d}")).read_metadata().state_dict_metadata
    moments = [name for name in stored if "exp_avg" in name]
    assert moments and all(".adapter." in name for name in moments)
    assert json.loads((alone / "training_complete.json").read_text())["iteration"] == STEPS
