"""What the repository promises about itself: commands in the README exist, nothing personal or machine-bound is
tracked.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from headrank.commands import VERBS

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 400  # the house rule is to stop at 300 lines; this is where a file is refused


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_tracked_file_names_a_package_index_or_a_path_of_one_machine() -> None:
    words = ["index" + "-url", "pypi" + ".org", "/" + "work/", "/" + "root/", "/" + "opt/", "/home/" + "user"]
    found = [f"{path.relative_to(ROOT)}: {word}" for path in tracked_files() for word in words if word in text_of(path)]
    assert not found


def test_python_files_are_short_and_lines_fit() -> None:
    long = {str(path.relative_to(ROOT)): text_of(path).count("\n") for path in tracked_files() if path.suffix == ".py"}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST_FILE and not name.startswith("tests/")}


def readme_commands() -> list[str]:
    """Every line of a shell block in README.md, joined over backslashes, without comments."""
    blocks = re.findall(
        r"```(?:bash|sh|console)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def test_the_readmes_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {words[1] for words in map(shlex.split, readme_commands()) if words[0] == "make"}
    assert asked >= {"demo", "test"} and asked <= targets


def test_the_readmes_headrank_commands_and_flags_exist() -> None:
    from headrank.commands import build_verb_parser

    asked = [words for words in map(shlex.split, readme_commands()) if words[0] == "headrank"]
    assert asked
    for words in asked:
        if words[1].startswith("-"):
            continue
        assert words[1] in VERBS, words
        known = {option for action in build_verb_parser(words[1])._actions for option in action.option_strings}
        assert {word.partition("=")[0] for word in words[2:] if word.startswith("--")} <= known, words


def test_paths_that_the_readme_links_exist() -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_shell_scripts_are_executable_and_strict() -> None:
    scripts = [path for path in tracked_files() if path.suffix == ".sh" or path.name == "run"]
    sourced = [path for path in scripts if not text_of(path).startswith("#!")]
    assert not [path for path in scripts if path not in sourced and not path.stat().st_mode & 0o100]
    assert not [path for path in scripts if path not in sourced and "set -euo pipefail" not in text_of(path)]
