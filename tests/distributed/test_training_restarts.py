"""Runs that are started again after something changed: damaged files, other flags, other data, other lengths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.forge import Outcome

MARK = "training_complete.json"


@pytest.fixture(scope="module")
def start(forge, toy, tmp_path_factory):
    """Start a run of some length in a folder; there is no reference to compute."""
    log = tmp_path_factory.mktemp("log") / "log"

    def start(save: Path, *more: str, iterations: int = 6, ranks: int = 1) -> Outcome:
        always = ("--lr", "1e-4", "--global-batch-size", "2", "--headrank-beta", "0")
        return forge.run(
            toy.flags(*always, "--train-iters", str(iterations), "--save", str(save), *more), log, ranks=ranks
        )

    return start


@pytest.fixture(scope="module")
def stopped(start, tmp_path_factory):
    """A run with checkpoints of iterations 2 and 4 of 6."""
    save = tmp_path_factory.mktemp("stopped")
    assert start(save, "--save-interval", "2", "--exit-interval", "4").codes == (0,)
    return save


@pytest.fixture
def copy(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run", symlinks=True))


def damage(save: Path, iteration: int, pattern: str) -> None:
    path = max((save / f"iter_{iteration:07d}").glob(pattern), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def is_refused(outcome: Outcome, *words: str) -> bool:
    return set(outcome.codes) == {2} and "Traceback" not in outcome.said and all(word in outcome.said for word in words)


@pytest.mark.parametrize("pattern", ["common.pt", "*.distcp"])
def test_a_checkpoint_with_changed_bytes_is_skipped_with_a_warning(start, copy, pattern):
    damage(copy, 4, pattern)
    outcome = start(copy, ranks=2)
    assert outcome.codes == (0, 0), outcome.said
    assert (
        "damaged, its checksums do not match; falling back to iteration 2" in outcome.said
        and "at iteration 2" in outcome.said
    )


def test_without_an_older_checkpoint_a_damaged_one_is_named_in_one_line(start, copy):
    for iteration in (2, 4):
        damage(copy, iteration, "common.pt")
    assert is_refused(start(copy), "iter_0000002/common.pt: damaged", "no older one is left", "start anew")


@pytest.mark.parametrize("flag", ["--use-distributed-optimizer", "--bf16"])
def test_another_kind_of_optimizer_is_refused_with_a_remedy_that_works(start, copy, flag):
    assert is_refused(start(copy, flag), f"was trained without {flag}", f"remove {flag}", "--no-load-optim")
    assert start(copy, flag, "--no-load-optim").codes == (0,)
    assert is_refused(start(copy, iterations=8), f"was trained with {flag}", f"add {flag}")


def test_another_depth_is_called_by_its_name(start, copy, tmp_path):
    assert is_refused(start(copy, "--headrank-full-depth"), "without --headrank-full-depth", "remove the flag")
    fresh = ("--load", str(copy), "--finetune", "--headrank-full-depth")
    assert is_refused(start(tmp_path / "new", *fresh), "holds layers 0-2 only, --headrank-full-depth needs all")


def test_a_folder_called_best_is_refused_before_the_training(start, copy):
    (copy / "best").mkdir()
    assert is_refused(start(copy), "best: a folder", "move it away")


def test_other_data_is_warned_about(start, toy, tmp_path):
    data, other = (Path(shutil.copytree(toy.train, tmp_path / name)) for name in ("data", "other"))
    save = tmp_path / "run"
    assert start(save, "--train-data-path", str(data), "--exit-interval", "1").codes == (0,)
    assert "other settings" not in start(save, "--train-data-path", str(data), "--exit-interval", "2").said
    pairs = (data / "pairs.jsonl").read_text().splitlines(keepends=True)
    (data / "pairs.jsonl").write_text("".join(pairs[:-1]))
    outcome = start(save, "--train-data-path", str(data), "--exit-interval", "3")
    assert outcome.codes == (0,) and "than the checkpoint's: the content of train_data\n" in outcome.said
    assert (
        "than the checkpoint's: train_data\n"
        in start(save, "--train-data-path", str(other), "--exit-interval", "4").said
    )


def test_the_mark_of_completion_tells_the_truth(start, copy, tmp_path):
    assert not (copy / MARK).exists()
    assert start(copy).codes == (0,)
    new = tmp_path / "new"
    assert start(new, "--load", str(copy)).codes == (0,)
    assert json.loads((new / MARK).read_text())["iteration"] == 6 and (new / "iter_0000006" / "common.pt").is_file()
    outcome = start(copy, "--override-opt-param-scheduler", iterations=3)
    assert outcome.codes == (0,), outcome.said
    assert "already at iteration 6, beyond --train-iters 3" in outcome.said
    assert start(copy, "--override-opt-param-scheduler", "--exit-interval", "7", iterations=9).codes == (0,)
    assert not (copy / MARK).exists(), "two steps are left"


def test_weights_that_left_the_range_are_neither_saved_nor_called_complete(start, toy, tmp_path):
    outcome = start(tmp_path / "run", "--lr", "1e30", "--clip-grad", "0", iterations=4, ranks=2)
    assert (
        outcome.codes == (2, 2)
        and "the weights are not finite any more" in outcome.said
        and "another --save" in outcome.said
    )
    assert not list((tmp_path / "run").glob("iter_*")) and not (tmp_path / "run" / MARK).exists()
