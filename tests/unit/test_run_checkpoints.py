"""The checkpoints of a run without weights: where a run starts and resumes, and which checkpoints it drops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrank.method.heads import HeadSet
from megatron_patches.checkpoints import files as checkpoint
from megatron_patches.checkpoints.run_checkpoints import RunCheckpoints, resolve_start
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import TrainingConfig, config_from
from tests.toy_collections import write_training_files

HEADS = HeadSet(((1, 2),), "headrank", "tiny", 4, 8)


@pytest.fixture(autouse=True)
def directories_are_checkpoints(monkeypatch):
    """A directory is a complete checkpoint, saving one makes it and moves the tracker, and this is rank 0."""

    def save(root: str, iteration: int, *_: Any) -> None:
        make(Path(root), iteration)

    monkeypatch.setattr(checkpoint, "is_complete", Path.is_dir)
    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def make(root: Path, *iterations: int | str) -> Path:
    """Empty checkpoints of these iterations; the tracker names the last."""
    for iteration in iterations:
        checkpoint.iteration_directory(root, iteration).mkdir(parents=True, exist_ok=True)
        (root / checkpoint.TRACKER).write_text(str(iteration))
    return root


def config(tmp_path: Path, *flags: str, **changes: Any) -> TrainingConfig:
    required = (
        "--headrank-model",
        "m",
        "--headrank-heads",
        "h",
        "--train-data-path",
        str(write_training_files(tmp_path)),
        "--lr",
        "1e-4",
    )
    return replace(config_from(parse_arguments([*required, *flags]), 1), **changes)


def save(tmp_path: Path, iteration: int, best_iteration: int = 0, keep: int = 2) -> set[int]:
    """What is left after a save at this iteration."""
    run = RunCheckpoints(config(tmp_path, "--save", str(tmp_path / "run"), keep_checkpoints=keep), HEADS)
    progress = {"iteration": iteration, "best_iteration": best_iteration, "best_ndcg": 0.5}
    run.save(None, None, None, progress)  # type: ignore[arg-type]
    return set(checkpoint.complete_iterations(tmp_path / "run"))


def test_the_newest_and_the_best_are_kept(tmp_path):
    make(tmp_path / "run", 50, 100, 150)
    assert save(tmp_path, 200, best_iteration=50) == {50, 150, 200}


def test_a_tracker_that_was_set_back_costs_neither_the_new_checkpoint_nor_the_later_ones(tmp_path):
    make(tmp_path / "run", 100, 200, 300)
    (tmp_path / "run" / checkpoint.TRACKER).write_text("100")
    assert save(tmp_path, 150) == {100, 150, 200, 300}
    assert save(tmp_path, 200) == {150, 200, 300}
    assert save(tmp_path, 350, keep=1) == {350}, "the run has passed 300"


def test_the_checkpoint_that_best_names_is_kept_also_when_the_run_knows_no_best(tmp_path):
    make(tmp_path / "run", 100, 200)
    (tmp_path / "run" / "best").symlink_to("iter_0000200")
    assert save(tmp_path, 250, keep=1) == {200, 250}


def test_finetuning_starts_from_load_and_measures_against_it(tmp_path):
    load, run = str(make(tmp_path / "load", 100)), tmp_path / "run"
    flags = ("--finetune", "--load", load, "--save", str(run))
    start = resolve_start(config(tmp_path, *flags))
    assert (start.pretrained_checkpoint, start.load) == (load, None)
    assert RunCheckpoints(start, HEADS).resume_iteration is None
    make(run, 7)
    again = resolve_start(config(tmp_path, *flags))
    assert again.pretrained_checkpoint == load
    assert (RunCheckpoints(again, HEADS).source, RunCheckpoints(again, HEADS).resume_iteration) == (str(run), 7)


def test_without_finetune_load_is_resumed_and_the_start_is_what_it_was(tmp_path):
    load = str(make(tmp_path / "load", "release", 100))
    start = resolve_start(config(tmp_path, "--load", load))
    assert (start.pretrained_checkpoint, start.load) == (f"{load}/release", load)
    assert RunCheckpoints(start, HEADS).resume_iteration == 100
