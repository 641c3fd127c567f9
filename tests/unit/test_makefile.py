"""make explains itself, refuses other Pythons in one line, and does nothing twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VENV", "PROCESSES", "PYTEST_ARGS")
    }
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def stamps() -> list[str]:
    """The names of the files that say: installed."""
    wanted = subprocess.run(
        "cat setup.py constraints.txt | cksum", shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [f".headrank-{kind}-{wanted.stdout.split()[0]}" for kind in ("run", "dev")]


def test_help_lists_every_target_that_people_call() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    printed = make("help").stdout
    assert not [target for target in phony.group(1).split() if f"make {target} " not in printed]


def test_make_alone_is_make_help() -> None:
    assert make().stdout == make("help").stdout


def test_a_python_that_is_too_new_is_one_clear_line(tmp_path: Path) -> None:
    python = tmp_path / "python3.13"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.13.0" && exit 0\nexit 1\n')
    python.chmod(0o755)
    done = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"headrank needs Python 3.10, 3.11 or 3.12; {python} is Python 3.13.0" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    for name in stamps():
        (tmp_path / name).touch()
    for target in ("test", "demo"):
        planned = make("-n", target, f"VENV={tmp_path}").stdout
        assert "pip" not in planned and ("pytest" in planned or "configs/demo.yaml" in planned)


def test_a_clone_in_a_folder_with_spaces_works(tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for name in stamps():
        (clone / ".venv" / name).touch()
    done = make("test", folder=clone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("-m pytest -n 2")


def test_an_environment_with_spaces_in_its_path_is_refused_in_one_line() -> None:
    done = make("setup", "VENV=my environment")
    assert done.returncode == 2
    assert "VENV='my environment': make cannot work with spaces" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_changed_requirements_install_again(tmp_path: Path) -> None:
    (tmp_path / ".headrank-run-1").touch()
    planned = make("-n", "setup", f"VENV={tmp_path}").stdout
    first, second = planned.index("torch==2.13.0"), planned.index("-c constraints.txt")
    assert first < second, "torch comes first and alone"


def test_constraints_pin_everything_exactly_and_torch_first() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "torch==2.13.0"
    assert not [
        line for line in lines if not re.fullmatch(r'[a-z0-9-]+==[\w.]+(; python_version (<|>=) "3\.1[0-9]")?', line)
    ]
