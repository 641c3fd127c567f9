"""The `headrank` command as a whole: help without torch, every verb explained, errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrank import __version__
from headrank.commands import VERBS, build_verb_parser, main
from headrank.errors import InputError
from headrank.placement import resolve_device

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "megatron", "ir_measures", "bm25s")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(flag: str) -> None:
    done = run_python(
        "import sys\nfrom headrank.commands import main\n"
        f"try:\n    main(['{flag}'])\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_without_torch(verb: str) -> None:
    done = run_python(
        "import sys\nfrom headrank.commands import main\n"
        f"try:\n    main(['{verb}', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('TORCH', 'torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: headrank {verb}" in done.stdout
    assert done.stdout.splitlines()[-1] == "TORCH False"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {verb} " in printed for verb in VERBS)


def test_the_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"headrank {__version__}\n"


def test_an_unknown_verb_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decode"])
    assert ended.value.code == 2
    assert "select-heads" in capsys.readouterr().err


def test_a_users_error_is_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--collection", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headrank evaluate: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["pairs", "--output", "out", "--sublist-size", "0"],
            "headrank pairs: argument --sublist-size: 0 is not at least 1; see 'headrank pairs --help'",
        ),
        (
            ["benchmark", "run", "--dtype", "fp8", "--benchmarks", "x", "--output", "y"],
            "headrank benchmark run: argument --dtype: invalid choice: 'fp8'",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_too(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(said) and error.count("\n") == 1


def test_a_missing_optional_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrank.commands import evaluate

    def needs_megatron(args: object) -> int:
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron.core")

    monkeypatch.setattr(evaluate, "run", needs_megatron)
    assert main(["evaluate", "run.txt"]) == 2
    assert "pip install 'headrank[train]'" in capsys.readouterr().err


def test_a_log_level_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRANK_LOG", "verbose")
    assert main(["benchmark", "list"]) == 2
    assert capsys.readouterr().err == (
        "headrank benchmark: HEADRANK_LOG 'verbose' in the environment is not a level; use DEBUG, INFO, WARNING or "
        "ERROR, or unset it\n"
    )


def test_a_librarys_parameter_is_a_flag_at_the_command_line_and_a_name_in_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(InputError, match="^`device` 'abacus'"):
        resolve_device("abacus", None)
    assert main(["doctor", "--part", "machine", "--device", "abacus"]) == 1
    assert "--device 'abacus'" in capsys.readouterr().out
    parser = build_verb_parser("benchmark")
    assert parser.in_flags("give `from` and `batch_size`") == "give --from and --batch-size", (
        "also the flags of an action"
    )
    assert parser.in_flags("query 'what does `ls` do'") == "query 'what does `ls` do'"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["rank"], "did you mean rerank?"),
        (["rerank", "--output", "x", "--deppth", "5"], "did you mean --depth?"),
        (["rerank", "--output", "x", "--order", "reverse"], "did you mean reversed?"),
        (["benchmark", "prepair", "dl19"], "did you mean prepare?"),
    ],
)
def test_a_misspelt_verb_flag_or_choice_gets_the_nearest_name(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and near in said and said.count("\n") == 1
