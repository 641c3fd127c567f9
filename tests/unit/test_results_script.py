"""launch/results.sh without running it: every command it would start is accepted by the parser that will read it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrank.commands import build_verb_parser
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import config_from

ROOT = Path(__file__).resolve().parents[2]


def commands(tmp_path: Path, *flags: str, **variables: str) -> list[list[str]]:
    """The words after 'python -m headrank' or pretrain_headrank.py of a dry run, by verb."""
    given = {"DRY_RUN": "1", "TRAIN": "a b", "EVAL": "dl19=x hotpotqa100=y", "OUTPUT": str(tmp_path / "out"), "SEEDS": "1 2", **variables}
    done = subprocess.run(
        [ROOT / "launch" / "results.sh", *flags], env={**os.environ, **given}, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        if "headrank" in words:
            found.append(words[words.index("headrank") + 1 :])
        elif "pretrain_headrank.py" in words:
            found.append(["train", *words[words.index("pretrain_headrank.py") + 1 :]])
    return found


def test_every_command_of_the_study_is_accepted_by_its_parser(tmp_path: Path) -> None:
    seen = commands(tmp_path, "--lr-warmup-iters", "5")
    for verb, *words in seen:
        if verb == "train":
            config = config_from(parse_arguments(words), world_size=1)
            assert config.schedule.lr_warmup_iters == 5
        else:
            build_verb_parser(verb).parse_args(words)
    verbs = [words[0] for words in seen]
    assert verbs.count("train") == 2 and verbs.count("benchmark") == 2 * (2 + 2) + 1 and verbs[-1] == "report"


def test_a_phase_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    given = {**os.environ, "DRY_RUN": "1", "TRAIN": "a", "EVAL": "x=y", "OUTPUT": str(tmp_path / "out"), "PHASES": "heads trian"}
    done = subprocess.run([ROOT / "launch" / "results.sh"], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "results.sh: unknown phase 'trian'; known: heads train evaluate rankgpt report\n"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("JOBS", "0", "JOBS '0' is not a whole number of at least 1"),
        ("DEPTHS", "20 abc", "DEPTHS: 'abc' is not a whole number of at least 1"),
        ("DEPTHS", "20 20", "DEPTHS: 20 is there twice"),
        ("SEEDS", " ", "SEEDS is empty; give whole numbers, separated by spaces"),
        ("PERMUTATIONS", "x", "PERMUTATIONS 'x' is not a whole number of at least 0"),
        ("QUERY_ROWS", "rows", "QUERY_ROWS 'rows' is not one of: query query-suffix instruction"),
        ("LAYOUT", "diagonal", "LAYOUT 'diagonal' is not one of: parallel sequential"),
        ("DTYPE", "float16", "DTYPE 'float16' is not one of: bfloat16 float32"),
        ("EVAL", "folder", "EVAL 'folder' is not NAME=FOLDER"),
        ("EVAL", "x=a x=b", "EVAL, by name: x is there twice"),
        ("ORDERS", "sideways", "ORDERS 'sideways' is neither retriever nor shuffled"),
        ("ORDERS", "shuffled shuffled", "ORDERS: shuffled is there twice"),
        ("WORDS", "x=0", "WORDS 'x=0' is not NAME=N with a whole number N of at least 1"),
        ("RANKGPT", "zzz", "RANKGPT 'zzz' is none of EVAL's names: x"),
        ("LR", "abc", "LR 'abc' is not a number above 0"),
        ("EPOCHS", "0", "EPOCHS '0' is not a number above 0"),
        ("TP", "x", "TP 'x' is not a whole number of at least 1"),
        ("TP", "3", "NPROC '1' is not a multiple of TP (3)"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line_before_anything_runs(tmp_path: Path, variable: str, value: str, said: str) -> None:
    given = {**os.environ, "DRY_RUN": "1", "TRAIN": "a", "EVAL": "x=y", "OUTPUT": str(tmp_path / "out"), variable: value}
    done = subprocess.run([ROOT / "launch" / "results.sh"], env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"results.sh: {said}\n", "")


def test_training_never_sees_a_test_collection(tmp_path: Path) -> None:
    for verb, *words in commands(tmp_path, PHASES="heads train"):
        assert not {"x", "y"} & {word.partition("=")[2] or word for word in words}, verb


def test_sequential_heads_come_from_one_selection_that_training_and_reselection_repeat(tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen = commands(tmp_path, PHASES="heads train", SEEDS="1", SELECT_ON="c d", SELECT_FLAGS="--prune 0.3", LAYOUT="sequential")
    chosen, again = (words for words in seen if words[0] == "select-heads" and "niah" not in words)
    for words in (chosen, again):
        args = build_verb_parser("select-heads").parse_args(words[1:])
        assert (args.collection, args.contexts, args.prune, args.max_words) == (["c", "d"], None, 0.3, 64)
        assert (args.document_layout, args.permutations) == (None, 1)
    assert build_verb_parser("select-heads").parse_args(chosen[1:]).method == ["entropy", "core", "qr"]
    assert config_from(parse_arguments(trained_with(seen)), world_size=1).heads == str(out / "heads.entropy.json")


def test_heads_are_selected_on_the_papers_prompt_and_trained_side_by_side(tmp_path: Path) -> None:
    seen = commands(tmp_path, PHASES="heads train", SEEDS="1")
    before, again = (
        build_verb_parser("select-heads").parse_args(words[1:]) for words in seen if words[0] == "select-heads" and "niah" not in words
    )
    assert (before.document_layout, before.permutations, before.no_retriever_order, before.temperature) == (None, 1, True, None)
    assert (again.permutations, again.no_retriever_order, again.temperature) == (1, True, 0.01)
    assert again.prompt_of == again.model == str(tmp_path / "out" / "seed-1" / "round-1" / "hf"), "in the layout that was trained"
    config = config_from(parse_arguments(trained_with(seen)), world_size=1)
    assert (config.heads, config.document_layout) == (str(tmp_path / "out" / "heads.entropy.json"), "parallel")


def trained_with(seen: list[list[str]]) -> list[str]:
    return next(words[1:] for words in seen if words[0] == "train")


def test_training_lists_come_in_the_orders_that_are_tested(tmp_path: Path) -> None:
    def trained(**variables: str) -> tuple[int, bool, bool]:
        config = config_from(parse_arguments(trained_with(commands(tmp_path, PHASES="train", **variables))), world_size=1)
        return config.permutations, config.with_retriever_order, config.bf16

    assert trained() == (1, False, True)
    assert trained(LAYOUT="sequential") == (1, True, True)
    assert trained(LAYOUT="sequential", PERMUTATIONS="0", DTYPE="float32") == (0, False, False)


def test_a_study_in_another_layout_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out" / "matrix").mkdir(parents=True)  # as from before there was a layout to choose
    given = {**os.environ, "DRY_RUN": "1", "TRAIN": "a", "EVAL": "x=y", "OUTPUT": str(tmp_path / "out")}
    done = subprocess.run([ROOT / "launch" / "results.sh"], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds a study with LAYOUT=sequential; choose another OUTPUT or that LAYOUT" in done.stderr
    (tmp_path / "out" / "layout").write_text("parallel\n")
    assert subprocess.run([ROOT / "launch" / "results.sh"], env=given, capture_output=True, check=False).returncode == 0


def test_training_free_methods_are_measured_in_every_order_and_side_by_side_once(tmp_path: Path) -> None:
    measured = {}
    for words in commands(tmp_path, PHASES="evaluate", EVAL="dl19=x", SEEDS="1"):
        args = build_verb_parser("benchmark").parse_args(words[1:])
        measured[tuple(args.methods)] = (args.document_layout, args.orders)
    side_by_side = ("parallel", ["retriever"])
    assert measured == {
        ("bm25", "icr", "core", "qr", "niah"): (None, ["retriever", "shuffled"]),
        ("icr+parallel", "core+parallel", "qr+parallel", "headrank+untrained", "headrank+control-1"): side_by_side,
        ("headrank+trained", "headrank"): side_by_side,
    }


def test_a_depth_that_gives_no_other_lists_is_left_out(tmp_path: Path) -> None:
    for name, candidates in (("short", 20), ("long", 30)):
        (tmp_path / name).mkdir()
        lines = [f"q1 Q0 d{rank} {rank} {-rank} bm25" for rank in range(1, candidates + 1)]
        (tmp_path / name / "run.bm25.txt").write_text("\n".join(lines) + "\n")
    seen = commands(tmp_path, PHASES="evaluate", DEPTHS="40 20", EVAL=f"short={tmp_path}/short long={tmp_path}/long absent=x")
    parsed = [build_verb_parser("benchmark").parse_args(cell[1:]) for cell in seen]
    depths = {args.benchmarks[0].partition("=")[0]: args.depths for args in parsed}
    assert depths == {"short": [20], "long": [20, 40], "absent": [20, 40]}


def test_a_collection_of_long_documents_has_words_of_its_own(tmp_path: Path) -> None:
    seen = commands(tmp_path, PHASES="evaluate", EVAL="dl19=x long=y longer=z", WORDS="longer=300 long=99")
    words = {args.benchmarks[0]: args.max_words for args in (build_verb_parser("benchmark").parse_args(cell[1:]) for cell in seen)}
    assert words == {"dl19=x": "64", "long=y": "99", "longer=z": "300"}


def test_the_control_reads_the_heads_of_every_seed_in_the_base_model(tmp_path: Path) -> None:
    base = next(words for words in commands(tmp_path, PHASES="evaluate") if "headrank+untrained" in words)
    assert "base=embedded" in base
    for seed in (1, 2):
        assert f"headrank+control-{seed}={tmp_path / 'out'}/seed-{seed}/round-1/heads.json" in base
    assert "--share-forward" in base


def test_jobs_side_by_side_do_what_they_do_one_after_the_other(pipeline) -> None:
    pipeline.output.mkdir()
    (pipeline.output / "heads.entropy.json").write_text("{}")
    folder = str(pipeline.folder / "collection")
    given = {"TRAIN": folder, "EVAL": f"dl19={folder}", "SELECT_ON": folder, "HELD_OUT": "", "PHASES": "train evaluate"}
    pipeline.machine(cores=4)
    code, made, said = pipeline.run(script="results.sh", JOBS="2", **given)
    assert code == 0, said
    assert made.count("pretrain_headrank.py") == 3 and made.count("benchmark") == 5 and made.index("benchmark") > made.index("export-hf")
    assert [(pipeline.output / f"seed-{seed}/round-1/train/threads").read_text() for seed in (1, 2, 3)] == ["2\n"] * 3, "of four cores"
    assert "pretrain_headrank.py" in (pipeline.output / "logs/seed-1.txt").read_text()
    code, again, _ = pipeline.run(script="results.sh", **given)
    assert code == 0 and again == ["benchmark"] * 5, "training is done, whatever JOBS was"


def test_a_training_that_fails_beside_others_ends_the_study_before_anything_is_measured(pipeline) -> None:
    pipeline.output.mkdir()
    (pipeline.output / "heads.entropy.json").write_text("{}")
    folder = str(pipeline.folder / "collection")
    given = {"TRAIN": folder, "EVAL": f"dl19={folder}", "SELECT_ON": folder, "HELD_OUT": "", "PHASES": "train evaluate"}
    code, made, said = pipeline.run(script="results.sh", JOBS="2", STOP_EARLY="1", **given)
    assert code == 1 and "benchmark" not in made
    assert f"failed; see {pipeline.output}/logs/seed-1.txt" in said


def test_ctrl_c_ends_the_jobs_that_run_side_by_side(pipeline) -> None:
    pipeline.output.mkdir()
    pipeline.calls.write_text("")
    pipeline.command("python", '#!/usr/bin/env bash\necho $$ >>"$CALLS"\nexec sleep 120\n')
    folder = str(pipeline.folder / "collection")
    given = {
        "TRAIN": folder,
        "EVAL": f"dl19={folder}",
        "SELECT_ON": folder,
        "PHASES": "evaluate",
        "JOBS": "2",
        "OUTPUT": str(pipeline.output),
    }
    given |= {"PYTHON": str(pipeline.folder / "python"), "CALLS": str(pipeline.calls)}
    script = subprocess.Popen([ROOT / "launch" / "results.sh"], env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = wait_for(lambda: pipeline.calls.read_text().split(), lambda found: len(found) == 2)
    script.send_signal(signal.SIGINT)
    assert script.wait(timeout=60) == 130
    assert wait_for(lambda: [pid for pid in pids if Path(f"/proc/{pid}").exists()], lambda left: not left) == []


def wait_for(look: Callable[[], list[str]], is_enough: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
    """What ``look`` finds, once it is enough or the time is up."""
    until = time.monotonic() + seconds
    while not is_enough(found := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return found
