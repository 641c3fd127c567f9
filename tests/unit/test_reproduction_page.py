"""docs/reproduction.md as a script: its shell blocks run in order, with stand-ins for what needs hardware, and the real
parsers judge every command that they or the launchers would start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
ABLATIONS = ("sft", "all-heads", "no-gate", "no-alps", "no-omega", "no-prox")
# what a stand-in does: say how it was called; sbatch runs the job as SLURM would, in its dry-run mode
STAND_INS = {
    **dict.fromkeys(["headrank", "pip", "make", "hf", "python3.11"], 'printf "%q " "$(basename "$0")" "$@"; echo'),
    "sbatch": 'SLURM_ARRAY_TASK_ID=0 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n1 bash "$@"',
    "scontrol": "echo n1",
    "srun": '"${@:2}"',
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The words of every command that the page's blocks lead to."""
    folder = tmp_path_factory.mktemp("reproduction")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "bin").mkdir()
    for name, body in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=folder,
        env={**clean, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [shlex.split(line, comments=True) for line in done.stdout.splitlines()]
    studies = [words[1:] for words in found if words[:3] == ["headrank", "experiment", "run"]]
    return found + [words for study in studies for words in commands_of_study(study)]


def commands_of_study(words: list[str]) -> list[list[str]]:
    """What a study would start; what it does by Python calls is left out."""
    from headrank.commands import build_verb_parser
    from headrank.experiments.phases import Command, select_phases
    from headrank.experiments.plan_study import plan_study
    from headrank.experiments.study_file import read_study

    args = build_verb_parser("experiment").parse_args(words[1:])
    chosen = select_phases(plan_study(read_study(ROOT / args.study, args.changes)).phases, args.only)
    return [list(phase.action.words) for phase in chosen if isinstance(phase.action, Command)]


def test_every_headrank_command_of_the_page_parses(commands: list[list[str]]) -> None:
    from headrank.commands import build_verb_parser

    calls = [words[1:] for words in commands if words[:1] == ["headrank"]]
    calls += [words[3:] for words in commands if words[1:3] == ["-m", "headrank"]]
    for verb, *arguments in calls:
        build_verb_parser(verb).parse_args(arguments)
    verbs = {"plan", "experiment", "retrieve", "pairs", "select-heads", "export-hf", "benchmark", "report", "view"}
    assert {call[0] for call in calls} == verbs


def test_every_training_run_of_the_page_is_the_papers(commands: list[list[str]]) -> None:
    from megatron_patches.training.arguments import parse_arguments
    from megatron_patches.training.config import config_from

    runs = []
    for words in commands:
        place = next((index for index, word in enumerate(words) if word.endswith("pretrain_headrank.py")), None)
        if place is not None:
            assert words[words.index("--nproc-per-node") + 1] == "8"
            runs.append(config_from(parse_arguments(words[place + 1 :]), world_size=8))
    assert len(runs) == 12, "0.6B alone, with its six ablations again, 1.7B, 4B twice, and the launcher"
    sizes = {(config.tensor_parallel, config.schedule.lr) for config in runs}
    assert sizes == {(4, 1e-5), (4, 5e-6), (8, 2e-6)}
    for config in runs:
        assert (config.global_batch_size, config.pairs_per_context, config.permutations) == (32, 1, 0)
        assert (config.schedule.clip_grad, config.epoch_unit, config.stop_after) == (5.0, "pairs", None)
        assert config.bf16 and config.use_distributed_optimizer
    whole = [config for config in runs if not any(f"/{name}/" in str(config.save) for name in ABLATIONS)]
    assert len(whole) == 6
    for config in whole:
        assert (config.loss.linear_weight, config.loss.proximal_weight) == (0.05, 0.05)
        assert config.keep_iters == (1800, 2200, 2800)


def test_the_page_warns_of_the_flag_that_must_not_be_given(commands: list[list[str]]) -> None:
    assert "Do not give `--remove-query` for ArguAna" in PAGE.read_text(encoding="utf-8")
    assert not [words for words in commands if "--remove-query" in words]


def test_the_scripts_and_pages_that_the_page_names_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:launch|configs)/[\w./]+\.(?:sh|sbatch|yaml)", text)) | {
        f"docs/{link}" for link in re.findall(r"\]\(([\w.]+)\)", text)
    }
    assert len(named) >= 6 and not [name for name in named if not (ROOT / name).exists()]
