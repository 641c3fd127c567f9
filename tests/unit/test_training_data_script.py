"""launch/build_training_data.sh: the commands it would run, and a real run on local collections."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.toy_collections import make_collection

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "build_training_data.sh"


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_dry_run_names_the_three_years_and_passes_arguments_on(tmp_path: Path) -> None:
    result = launch("--hold-out", "dev ids.txt", DRY_RUN="1", OUTPUT=str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("--topics ")[1].split()[0] for line in lines[:3]] == ["dl21", "dl22", "dl23"]
    assert all("--index msmarco-v2-passage" in line and "--top-k 100" in line for line in lines[:3])
    assert lines[3].count("--collection ") == 3
    assert r"--hold-out dev\ ids.txt" in lines[3]
    assert not (tmp_path / "out").exists()


def test_collections_that_are_there_are_not_retrieved_again(tmp_path: Path) -> None:
    make_collection(tmp_path / "collections" / "dl22", {"q": [0, 1]})
    lines = launch(DRY_RUN="1", OUTPUT=str(tmp_path)).stdout.splitlines()
    assert lines[1].startswith("#")
    assert sum("retrieve" in line for line in lines) == 2


def test_local_collections_give_pairs_and_the_distance_from_the_paper(tmp_path: Path) -> None:
    folders = [make_collection(tmp_path / name, {f"{name}1": [0, 1, 2], f"{name}2": [1, 0]}).queries_path.parent for name in ("a", "b")]
    result = launch(COLLECTIONS=" ".join(map(str, folders)), OUTPUT=str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert "here: 4 queries (-207), 6 pairs (-100.0 %)" in result.stdout
    assert len((tmp_path / "out" / "pairs.jsonl").read_text().splitlines()) == 6


def test_a_failing_step_stops_the_script(tmp_path: Path) -> None:
    result = launch(COLLECTIONS=str(tmp_path / "absent"), OUTPUT=str(tmp_path / "out"))
    assert result.returncode == 2
    assert "absent" in result.stderr


def test_a_switch_that_is_neither_is_refused_and_threads_do_not_spin(tmp_path: Path) -> None:
    refused = launch(DRY_RUN="yes", OUTPUT=str(tmp_path))
    assert (refused.returncode, refused.stderr) == (2, "build_training_data.sh: DRY_RUN 'yes' is neither 0 nor 1\n")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$OMP_WAIT_POLICY $GOMP_SPINCOUNT"\n')
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    given = {**clean, "PYTHON": str(python), "COLLECTIONS": "a", "OUTPUT": str(tmp_path)}
    done = subprocess.run([str(SCRIPT)], env=given, capture_output=True, text=True, check=True)
    assert done.stdout == "PASSIVE 0\n"


def test_the_local_part_of_the_papers_data_has_the_known_counts(shared_data: Path, tmp_path: Path) -> None:
    result = launch(COLLECTIONS=f"{shared_data / 'dl21'} {shared_data / 'dl23-llmjudge'}", OUTPUT=str(tmp_path))
    assert "here: 103 queries (-108), 78,193 pairs (-14.1 %)" in result.stdout
