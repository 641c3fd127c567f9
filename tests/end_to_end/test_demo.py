"""configs/demo.yaml on a tiny random model: every phase runs, the table is printed, a second run does nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Demo = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def demo(
    tiny_model: Callable[[str], Path], embedded_collection: Path, tmp_path_factory: pytest.TempPathFactory
) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    for name, count in (("train", 4), ("heldout", 2)):
        lines = (embedded_collection / f"{name}.qids").read_text().splitlines(keepends=True)
        (folder / f"{name}.qids").write_text("".join(lines[::4][:count]))
    changes = {
        "model": tiny_model("qwen3"),
        "output": folder / "out",
        "data.train_queries": folder / "train.qids",
        "heads.queries": folder / "train.qids",
        "benchmarks.heldout.queries": folder / "heldout.qids",
        "training.lr": "1e-3",
        "name": "tiny",
    }

    def run(action: str, *flags: str, **more: object) -> subprocess.CompletedProcess[str]:
        settings = [f"{key}={value}" for key, value in {**changes, **more}.items()]
        words = [
            sys.executable,
            "-m",
            "headrank",
            "experiment",
            action,
            "configs/demo.yaml",
            *flags,
            "--set",
            *settings,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"}
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_tensor_parallel_size_that_cannot_be_is_said_at_once(demo: Demo, tmp_path: Path) -> None:
    done = demo("run", **{"training.tensor_parallel": 7, "output": tmp_path / "out"})
    assert done.returncode == 2
    assert "training.tensor_parallel" in done.stderr and "7 does not divide" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_demo_ends_with_a_table_and_paths_that_exist_and_does_nothing_twice(demo: Demo) -> None:
    first = demo("run")
    assert first.returncode == 0, first.stdout[-5000:] + first.stderr
    table = first.stdout[first.stdout.index("heldout: top 12") :]
    for method in ("BM25", "ICR, all heads", "CoRe heads", "HeadRank"):
        assert re.search(rf"{method}.*\d+\.\d.*\d+\.\d - \d+\.\d", table), table
    assert "of 4" in table, "the layers used stand in the table"
    assert "with ICR" in table, "CoRe's heads were read off ICR's forward"
    paths = re.findall(r"^  (report|viewer|model) +(\S+)$", table, re.MULTILINE)
    assert {label for label, _ in paths} == {"report", "viewer", "model"}
    assert all((ROOT / path).exists() for _, path in paths)
    second = demo("run")
    assert second.stdout.count("done before") == 12, "every phase"
    assert numbers(second.stdout) == numbers(first.stdout)
    shown = demo("show").stdout
    assert "12 of 12 phases done" in shown and shown.count("done\n") >= 12


def numbers(printed: str) -> list[str]:
    """NDCG@10 and interval of every row."""
    return re.findall(r"\d+\.\d +│ +\d+\.\d - \d+\.\d", printed)


def test_a_dry_run_writes_nothing(demo: Demo, tmp_path: Path) -> None:
    done = demo("run", "--dry-run", output=tmp_path / "nothing")
    assert "pretrain_headrank.py" in done.stdout and not (tmp_path / "nothing").exists()
