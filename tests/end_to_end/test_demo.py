"""launch/demo.sh on a tiny random model: every phase runs, the table is printed, a second run skips what is done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tiny_model: Callable[[str], Path], embedded_collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    folder = tmp_path_factory.mktemp("demo")
    for name, count in (("train", 4), ("heldout", 2)):
        lines = (embedded_collection / f"{name}.qids").read_text().splitlines(keepends=True)
        (folder / f"{name}.qids").write_text("".join(lines[::4][:count]))
    variables = {
        "MODEL": str(tiny_model("qwen3")),
        "OUTPUT": str(folder / "out"),
        "TRAIN_QUERIES": str(folder / "train.qids"),
        "HELD_OUT_QUERIES": str(folder / "heldout.qids"),
        "DEPTH": "12",
        "LR": "1e-3",
        "PYTHON": sys.executable,
        "TERM": "dumb",
    }

    def run(**more: str) -> str:
        done = subprocess.run(
            [ROOT / "launch" / "demo.sh"],
            env={**os.environ, **variables, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("size", "message"), [("7", "--tensor-model-parallel-size 7 does not divide"), ("three", "TP 'three' is not a whole number")]
)
def test_a_tensor_parallel_size_that_cannot_be_is_said_at_once(
    size: str, message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    variables = {"TP": size, "MODEL": str(tiny_model("qwen3")), "OUTPUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "launch" / "demo.sh"], env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_demo_ends_with_a_table_and_paths_that_exist_and_does_nothing_twice(demo: Callable[..., str]) -> None:
    first = demo()
    table = first[first.index("held-out queries\n") :] if "held-out queries\n" in first else first[-3000:]
    for method in ("BM25", "ICR", "CoRe heads", "HeadRank"):
        assert re.search(rf"{method}.*\d+\.\d.*\d+\.\d - \d+\.\d", table), table
    assert "of 4" in table, "the layers used stand in the table"
    paths = re.findall(r"^  (report|figures|viewer|model) +(\S+)$", table, re.MULTILINE)
    assert {label for label, _ in paths} >= {"report", "viewer", "model"}
    assert all(Path(path).exists() for _, path in paths)
    second = demo()
    assert second.count("done before") == 9, "the heads, five phases, three reranked cells"
    assert numbers(second) == numbers(first)


def numbers(printed: str) -> list[str]:
    """NDCG@10 and interval of every row."""
    return re.findall(r"\d+\.\d +│ +\d+\.\d - \d+\.\d", printed)


def test_a_dry_run_writes_nothing(demo: Callable[..., str], tmp_path: Path) -> None:
    printed = demo(DRY_RUN="1", OUTPUT=str(tmp_path / "nothing"))
    assert "pretrain_headrank.py" in printed and not (tmp_path / "nothing").exists()
