"""The training launchers and SLURM jobs without hardware: what they would start, and that the real parsers accept
it.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_patches.training.arguments import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
# name -> model in the planner's table, and the paper's tensor parallelism and learning rate
PAPER = {
    "qwen3_0.6b": ("Qwen3-0.6B", 4, 1e-5),
    "qwen3_1.7b": ("Qwen3-1.7B", 4, 5e-6),
    "qwen3_4b": ("Qwen3-4B", 8, 2e-6),
}
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/slurm/*.sbatch")])


def started(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        [ROOT / "launch" / script, *arguments], env={**clean, **variables}, capture_output=True, text=True, check=False
    )


def dry_command(script: str, *arguments: str, **variables: str) -> tuple[list[str], list[str]]:
    """The words before and after pretrain_headrank.py of the command that a dry run prints."""
    done = started(script, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    place = next(index for index, word in enumerate(words) if word.endswith("pretrain_headrank.py"))
    return words[:place], words[place + 1 :]


@pytest.mark.parametrize("name", PAPER)
def test_a_dry_run_gives_the_papers_settings_to_the_real_parser(name: str) -> None:
    from megatron_patches.training.config import config_from

    model, tensor_parallel, learning_rate = PAPER[name]
    before, after = dry_command(f"train_{name}.sh")
    assert before[:3] == ["python", "-m", "torch.distributed.run"]
    assert before[before.index("--nproc-per-node") + 1] == "8"
    args = parse_arguments(after)
    config = config_from(args, world_size=8)
    assert Path(args.headrank_model).name == model
    assert (config.tensor_parallel, config.data_parallel) == (tensor_parallel, 8 // tensor_parallel)
    assert (config.micro_batch_size, config.global_batch_size, config.pairs_per_context) == (1, 32, 1)
    assert (config.schedule.lr, config.schedule.clip_grad) == (learning_rate, 5.0)
    assert (config.epochs, config.epoch_unit, config.train_iters) == (1, "pairs", None)
    assert (config.loss.linear_weight, config.loss.proximal_weight) == (0.05, 0.05)
    assert config.bf16 and config.use_distributed_optimizer and config.exit_signal_handler and not config.full_depth
    assert args.distributed_backend is None, "nccl where there is CUDA"


def test_the_three_launchers_differ_only_in_their_model_block() -> None:
    def rest(name: str) -> list[str]:
        lines = (ROOT / "launch" / f"train_{name}.sh").read_text().splitlines()
        return [line for line in lines if not line.startswith(("#", "NAME=", "MODEL=", "TP=", "LR="))]

    assert rest("qwen3_0.6b") == rest("qwen3_1.7b") == rest("qwen3_4b")


def test_paths_come_first_and_flags_win_over_defaults() -> None:
    _, after = dry_command(
        "train_qwen3_0.6b.sh", "my model", "h.json", "data", "out", "--lr", "1e-4", "--headrank-gamma", "0"
    )
    args = parse_arguments(after)
    assert (args.headrank_model, args.headrank_heads, args.train_data_path, args.save) == (
        "my model",
        "h.json",
        ["data"],
        "out",
    )
    assert (args.lr, args.headrank_gamma) == (1e-4, 0.0)
    assert args.tensorboard_dir == "out/tensorboard"


def test_variables_change_what_they_name() -> None:
    _, after = dry_command(
        "train_qwen3_4b.sh",
        PAIRS_PER_CONTEXT="16",
        TRAIN_ITERS="2800",
        STOP_AFTER="1800",
        SEQ_LENGTH="16384",
        VALID_DATA="dev",
        EXIT_MINUTES="60",
        PRECISION="fp32",
    )
    args = parse_arguments(after)
    assert (args.headrank_pairs_per_context, args.train_iters, args.seq_length) == (16, 2800, 16384)
    assert (args.valid_data_path, args.eval_interval, args.exit_duration_in_mins, args.bf16) == (
        ["dev"],
        100,
        60,
        False,
    )
    assert (args.headrank_epochs, args.headrank_stop_after, args.headrank_keep_iters) == (1, 1800, [1800, 2200, 2800])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "x"], ["--lr", "x"]),
        (["--global-batch-size", "33"], ["33", "2"]),
        (["--tensor-model-parallel-size", "3"], ["3", "8"]),
        (["--headrank-epochs", "-1"], ["--headrank-epochs"]),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_the_real_parser(flags: list[str], words: list[str], capsys) -> None:
    """The launchers hold arrays and no checks of their own."""
    from headrank.errors import InputError
    from megatron_patches.training.config import config_from

    _, after = dry_command("train_qwen3_0.6b.sh", *flags)
    try:
        config_from(parse_arguments(after), world_size=8)
        said = ""
    except SystemExit:
        said = capsys.readouterr().err
    except InputError as error:
        said = str(error)
    assert said and not [word for word in words if word not in said], said


def test_on_one_node_its_number_in_a_larger_job_is_no_matter() -> None:
    before, _ = dry_command("train_qwen3_0.6b.sh", NODE_RANK="3")
    assert "--standalone" in before and "--node-rank" not in before


def test_a_fifth_path_is_refused() -> None:
    done = started("train_qwen3_0.6b.sh", "model", "heads", "data", "save", "more", DRY_RUN="1")
    assert done.returncode == 2 and "'more' is one word too many" in done.stderr


def test_several_nodes_meet_at_the_master_address() -> None:
    before, _ = dry_command("train_qwen3_4b.sh", NNODES="4", NODE_RANK="3", MASTER_ADDR="node7", MASTER_PORT="23456")
    options = dict(itertools.pairwise(before))
    assert [options[name] for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")] == [
        "4",
        "3",
        "node7",
        "23456",
    ]
    assert "--standalone" not in before


def test_without_heads_a_launcher_says_the_command_that_selects_them(tmp_path: Path) -> None:
    from headrank.commands import build_verb_parser

    done = started(
        "train_qwen3_0.6b.sh",
        "models/Qwen3-0.6B",
        str(tmp_path / "heads.json"),
        PYTHON="false",
        TOP_K="3",
        TEMPERATURE="1",
    )
    assert done.returncode == 2
    advice = shlex.split(done.stderr.splitlines()[-1])
    assert advice[:2] == ["headrank", "select-heads"]
    args = build_verb_parser("select-heads").parse_args([word for word in advice[2:] if word != "..."])
    assert (args.top_k, args.entropy_weight, args.temperature, args.depth) == (8, 0.1, 0.001, 100), (
        "the paper's, whatever is exported"
    )
    assert args.output == str(tmp_path / "heads.json")


def test_waiting_threads_of_a_training_do_not_spin(tmp_path: Path) -> None:
    (tmp_path / "heads.json").touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$OMP_WAIT_POLICY $GOMP_SPINCOUNT $TOKENIZERS_PARALLELISM"\n')
    python.chmod(0o755)
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    script = ROOT / "launch/train_qwen3_0.6b.sh"
    given = {**clean, "PYTHON": str(python), "HEADS": str(tmp_path / "heads.json")}
    done = subprocess.run([script], cwd=tmp_path, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "PASSIVE 0 false"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run(["shellcheck", "-x", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path):
    """A pretended SLURM: srun and the recipe only note how they were called; ENDS says what training does."""
    commands = {
        "srun": 'echo "srun $*" >>"$CALLS"; echo "$MASTER_ADDR:$MASTER_PORT nodes=$NNODES procs=$NPROC save=$SAVE" '
        '"${SRUN_CPUS_PER_TASK-}" >>"$CALLS"\n'
        'case $ENDS in complete) mkdir -p "$SAVE" && touch "$SAVE/training_complete.json" ;; failed) exit 7 ;; esac',
        "scontrol": 'if [[ $1 == show ]]; then printf "n3\\nn4\\n"; else echo "scontrol $*" >>"$CALLS"; fi',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def submit(script: str, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
        calls = tmp_path / "calls"
        calls.write_text("")
        slurm = {
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "n[3-4]",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_NNODES": "1",
        }
        environment = {
            **os.environ,
            **slurm,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "SAVE": str(tmp_path / "save"),
        }
        done = subprocess.run(
            ["bash", ROOT / "launch/slurm" / script, *arguments],
            cwd=ROOT,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr

    return submit


def test_the_ranks_of_a_job_get_the_cpus_that_it_asked_for(cluster) -> None:
    for variables, cpus in (({"SLURM_CPUS_PER_TASK": "64"}, "64"), ({}, "")):
        for script, more in (
            ("train.sbatch", {"ENDS": "complete"}),
            ("evaluate.sbatch", {"MODELS": "x", "SLURM_ARRAY_TASK_ID": "0"}),
        ):
            variables_of_job = {
                "MASTER_PORT": "1",
                "MASTER_ADDR": "n",
                "NNODES": "1",
                "NPROC": "1",
                **variables,
                **more,
            }
            code, calls, said = cluster(script, **variables_of_job)
            assert code == 0 and calls[1].endswith(f"/save {cpus}"), (script, calls, said)


def test_a_finished_slurm_job_is_not_requeued(cluster) -> None:
    code, calls, _ = cluster("train.sbatch", "--lr", "1e-4", RECIPE="qwen3_1.7b", ENDS="complete")
    assert code == 0
    assert calls[0] == "srun --kill-on-bad-exit=1 launch/train_qwen3_1.7b.sh --lr 1e-4"
    assert calls[1].startswith("n3:32345 nodes=1 procs=8 ")
    assert len(calls) == 2


@pytest.mark.parametrize("script", ["train.sbatch", "train_multi_node.sbatch"])
@pytest.mark.parametrize(
    "arguments",
    [["--save", "elsewhere"], ["--lr", "1e-4", "--save=elsewhere"], ["model", "heads.json", "--lr", "1e-4"]],
    ids=str,
)
def test_a_job_whose_end_would_be_looked_for_elsewhere_is_refused(cluster, script: str, arguments: list[str]) -> None:
    code, calls, said = cluster(script, *arguments, ENDS="complete")
    assert (code, calls, len(said.splitlines())) == (2, [], 1) and "set SAVE=..." in said


def test_how_often_a_job_saves_is_no_place_to_save(cluster) -> None:
    assert cluster("train.sbatch", "--save-interval", "50", ENDS="complete")[0] == 0


def test_a_job_that_saved_and_stopped_goes_back_into_the_queue(cluster) -> None:
    code, calls, _ = cluster("train_multi_node.sbatch", RECIPE="qwen3_4b", ENDS="stopped", SLURM_NNODES="2")
    assert code == 0
    assert calls[1].startswith("n3:32345 nodes=2 procs=8 ")
    assert calls[2:] == ["scontrol requeue 12345"]


def test_a_failed_job_keeps_its_exit_code_and_stays_out_of_the_queue(cluster) -> None:
    code, calls, _ = cluster("train.sbatch", ENDS="failed")
    assert code == 7 and not [call for call in calls if "requeue" in call]


@pytest.mark.parametrize("name", ["train.sbatch", "train_multi_node.sbatch"])
def test_training_jobs_ask_for_the_warning_signal_and_log_by_name_and_id(name: str) -> None:
    lines = (ROOT / "launch" / "slurm" / name).read_text().splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=USR1@300", "--open-mode=append", "--output=logs/%x-%j.log"} <= set(asked)


def test_the_evaluation_array_covers_the_registered_benchmarks(cluster) -> None:
    from data_tools.benchmarks import BENCHMARKS

    seen = []
    for task in range(14):
        code, _, printed = cluster("evaluate.sbatch", MODELS="x y", SLURM_ARRAY_TASK_ID=str(task), DRY_RUN="1")
        assert code == 0
        words = shlex.split(printed)
        seen.append(words[words.index("--benchmarks") + 1])
    assert sorted(seen) == sorted(BENCHMARKS)


def test_an_evaluation_task_is_one_benchmark_for_the_real_parser(cluster) -> None:
    from headrank.commands import build_verb_parser

    variables = {"MODELS": "x y", "METHODS": "icr core", "HEADS": "core.json", "SLURM_ARRAY_TASK_COUNT": "14"}
    _, _, printed = cluster("evaluate.sbatch", "--restart", SLURM_ARRAY_TASK_ID="2", DRY_RUN="1", **variables)
    words = shlex.split(printed)
    assert words[:4] == ["python", "-m", "headrank", "benchmark"]
    args = build_verb_parser("benchmark").parse_args(words[4:])
    assert (args.benchmarks, args.models, args.methods) == (["trec-covid"], ["x", "y"], ["icr", "core"])
    assert (args.heads, args.shard, args.batch_size, args.restart) == (["core.json"], "0/1", 16, True)
    assert cluster("evaluate.sbatch", SLURM_ARRAY_TASK_ID="99", **variables)[:2] == (0, [])
