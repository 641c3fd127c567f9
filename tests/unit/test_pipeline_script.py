"""The launchers of several steps with a stand-in for python: what runs, what is skipped, what is done again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "$3"; exit; fi # the demo asks for the folder of its model
echo "$*" >>"$CALLS"
output= save= exported=
args=("$@")
for ((i = 0; i < ${#args[@]}; i++)); do
    case ${args[i]} in --output) output=${args[i+1]} ;; --save) save=${args[i+1]} ;; --exported) exported=${args[i+1]} ;; esac
done
case " $* " in
    *" pairs "*) mkdir -p "$output" && echo "$*" >"$output/pairs.jsonl" && touch "$output/pairs.summary.json" ;;
    *" --method core entropy "*) for name in core entropy; do echo "${FOUND:-}" >"${output%.json}.$name.json"; done ;;
    *" select-heads "*) echo "${FOUND:-}" >"$output" ;;
    *" export-hf "*) mkdir -p "$output" && touch "$output/headrank.json"
        if [[ -n $exported ]]; then cp -p "$exported/config.json" "$output"; else touch "$output/config.json"; fi ;;
    *" rerank "*) mkdir -p "$(dirname "$output")" && touch "$output" ;;
    *pretrain_headrank.py*) mkdir -p "$save" && touch "$save/state" && echo "${OMP_NUM_THREADS:-}" >"$save/threads"
        [[ -n ${STOP_EARLY:-} ]] || touch "$save/training_complete.json" ;;
esac
"""


class Pipeline:
    """A collection, an output directory and the calls that were made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.output = folder, folder / "calls", folder / "out"
        (folder / "collection").mkdir()
        for name in ("queries.tsv", "corpus.jsonl", "qrels.txt", "run.bm25.txt"):
            (folder / "collection" / name).write_text("x\n")
        (folder / "held.qids").write_text("q1\n")
        (folder / "collection/train.qids").write_text("q1\tfirst\nq2\tfirst\nq3\tsecond\n")
        self.command("python", STAND_IN)
        (folder / "bin").mkdir()

    def command(self, path: str, text: str) -> None:
        """An executable file; one below bin/ is found before the system's."""
        (self.folder / path).write_text(text)
        (self.folder / path).chmod(0o755)

    def machine(self, cores: int, gigabytes: int = 16) -> None:
        """Pretend so many cores and so much free memory."""
        self.command("bin/getconf", f"#!/bin/sh\necho {cores}\n")
        self.command("bin/awk", f'#!/bin/sh\ncase "$*" in */proc/meminfo) echo {gigabytes} ;; *) exec {shutil.which("awk")} "$@" ;; esac\n')

    def run(self, *flags: str, script: str = "pipeline.sh", **variables: str) -> tuple[int, list[str], str]:
        """Exit code, the kinds of the calls made, and what was printed."""
        self.calls.write_text("")
        settings = {"COLLECTION": str(self.folder / "collection"), "OUTPUT": str(self.output), "HELD_OUT": str(self.folder / "held.qids")}
        clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NPROC", "TP")}
        settings |= {"PYTHON": str(self.folder / "python"), "CALLS": str(self.calls), "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        environment = {**clean, **settings, **variables}
        done = subprocess.run([ROOT / "launch" / script, *flags], env=environment, capture_output=True, text=True, check=False)
        kinds = (
            "pairs",
            "select-heads",
            "pretrain_headrank.py",
            "export-hf",
            "rerank",
            "evaluate",
            "report",
            "view",
            "examples/demo_table.py",
        )
        made = [next(kind for kind in kinds if kind in call.split()) for call in self.calls.read_text().splitlines()]
        return done.returncode, made, done.stdout + done.stderr


@pytest.fixture
def pipeline(tmp_path):
    return Pipeline(tmp_path)


WHOLE = ["pairs", "pairs", "select-heads", "pretrain_headrank.py", "export-hf", "select-heads", "export-hf"]


def test_the_phases_run_in_order_and_a_second_run_does_nothing(pipeline):
    assert pipeline.run()[:2] == (0, WHOLE)
    code, made, said = pipeline.run()
    assert (code, made) == (0, []) and said.count("done before") == len(WHOLE)


def test_a_changed_setting_repeats_its_phase_and_those_after_it(pipeline):
    pipeline.run()
    (pipeline.output / "round-1/train/state").write_text("of the old learning rate")
    assert pipeline.run(LR="5e-5")[:2] == (0, WHOLE[3:])
    assert (pipeline.output / "round-1/train/state").read_text() == "", "checkpoints of another command must not be resumed"


@pytest.mark.parametrize("name", ["qrels.txt", "queries.tsv", "corpus.jsonl"])
def test_changed_judgements_queries_or_texts_repeat_everything(pipeline, name):
    pipeline.run()
    (pipeline.folder / "collection" / name).write_text("other\n")
    assert pipeline.run()[1] == WHOLE


def test_changed_weights_under_the_same_name_repeat_everything(pipeline):
    model = pipeline.folder / "base"
    model.mkdir()
    (model / "model.safetensors").write_text("weights")
    assert pipeline.run(MODEL=str(model))[1] == WHOLE
    assert pipeline.run(MODEL=str(model))[1] == []
    (model / "model.safetensors").write_text("other weights")
    assert pipeline.run(MODEL=str(model))[1] == WHOLE


def test_another_number_of_cores_or_threads_is_no_other_training(pipeline):
    pipeline.machine(cores=8)
    pipeline.run(NPROC="2")
    threads = pipeline.output / "round-1/train/threads"
    assert threads.read_text() == "4\n", "the training processes share the cores"
    pipeline.machine(cores=2)
    assert pipeline.run(NPROC="2")[1] == [] and pipeline.run(NPROC="2", OMP_NUM_THREADS="3")[1] == []
    threads.with_name("training_complete.json").unlink()
    assert pipeline.run(NPROC="2", OMP_NUM_THREADS="3")[1] == ["pretrain_headrank.py"]
    assert threads.read_text() == "3\n"


def test_a_file_that_flags_name_is_an_input(pipeline):
    chosen = pipeline.folder / "chosen.qids"
    chosen.write_text("q1\n")
    assert pipeline.run(SELECT_FLAGS=f"--only {chosen}")[1] == WHOLE
    assert pipeline.run(SELECT_FLAGS=f"--only {chosen}")[1] == []
    chosen.write_text("q1\nq2\n")
    assert pipeline.run(SELECT_FLAGS=f"--only {chosen}")[1] == WHOLE


def test_what_the_pipeline_did_not_make_is_left_alone(pipeline):
    mine = pipeline.output / "pairs" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("notes")
    code, made, said = pipeline.run()
    assert (code, made) == (2, []) and "was not made by this pipeline" in said and mine.read_text() == "notes"


@pytest.mark.parametrize("place", ["model", "round-1/hf", "pairs/base"])
def test_a_model_that_lies_where_the_pipeline_writes_is_refused(pipeline, place):
    model = pipeline.output / place
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    code, made, said = pipeline.run(MODEL=str(model))
    assert (code, made) == (2, []) and "choose another OUTPUT" in said and (model / "config.json").exists()


def test_a_model_beside_what_the_pipeline_writes_is_fine(pipeline):
    model = pipeline.output / "model-base"
    model.mkdir(parents=True)
    assert pipeline.run(MODEL=str(model))[:2] == (0, WHOLE)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NPROC", "x", "NPROC 'x' is not a whole number of at least 1"),
        ("TP", "0", "TP '0' is not a whole number of at least 1"),
        ("DRY_RUN", "yes", "DRY_RUN 'yes' is neither 0 nor 1"),
        ("RESELECT", "no", "RESELECT 'no' is neither 0 nor 1"),
        ("COLLECTION", "nowhere", "no queries.tsv there"),
        ("HELD_OUT", "nowhere.qids", "HELD_OUT 'nowhere.qids' is no file"),
        ("HEADS", "nowhere.json", "HEADS 'nowhere.json' is no file"),
    ],
)
def test_a_wrong_setting_is_one_line(pipeline, variable, value, words):
    code, made, said = pipeline.run(**{variable: value})
    assert (code, made, len(said.splitlines())) == (2, [], 1) and words in said


@pytest.mark.parametrize(
    ("variable", "value", "words"), [("VARIANTS", "full odd", "unknown variant 'odd'"), ("HEADS", "x", "HEADS is set")]
)
def test_ablations_refuse_before_anything_is_trained(pipeline, variable, value, words):
    code, made, said = pipeline.run(script="ablations.sh", **{variable: value})
    assert (code, made) == (2, []) and words in said


class TestTuning:
    """launch/tune.sh with the same stand-in."""

    def run(self, pipeline: Pipeline, rows: str, **variables: str) -> tuple[int, list[str], str]:
        (pipeline.folder / "rows.tsv").write_text(rows)
        settings = {"SETTINGS": str(pipeline.folder / "rows.tsv"), "VALID_QUERIES": str(pipeline.folder / "held.qids")}
        return pipeline.run(script="tune.sh", **{**settings, **variables})

    def test_rows_run_once_and_a_changed_row_again(self, pipeline):
        code, made, _ = self.run(pipeline, "a\t--lr 1e-4\n# no row\nb\t")  # no line end after the last
        assert (code, made) == (0, ["pairs", "pairs", "select-heads", "pretrain_headrank.py", "pretrain_headrank.py", "report"])
        assert self.run(pipeline, "a\t--lr 1e-4\nb\t\n")[1] == ["report"]
        assert self.run(pipeline, "a\t--lr 2e-4\nb\t\n")[1] == ["pretrain_headrank.py", "report"]
        assert "--lr 2e-4" in pipeline.calls.read_text()
        assert self.run(pipeline, "b\t\n", ITERATIONS="9")[1] == ["pretrain_headrank.py", "report"]

    def test_rows_on_other_pairs_lists_or_heads_are_run_again_with_reference_scores_of_their_own(self, pipeline):
        def cache() -> str:
            return re.findall(r"--headrank-reference-cache (\S+)", pipeline.calls.read_text())[0]

        train = pipeline.folder / "train.qids"
        train.write_text("q2\n")
        given = {"TRAIN_QUERIES": str(train)}
        self.run(pipeline, "a\t\n", **given)
        caches = [cache()]
        for variable, value, steps in (
            ("PAIRS_FLAGS", "--depth 7", ["pairs", "select-heads"]),
            ("VALID_FLAGS", "--depth 7", ["pairs"]),
            ("FOUND", "other heads", ["select-heads"]),
        ):
            given[variable] = value
            if variable == "FOUND":
                (pipeline.output / "heads.json").unlink()
            (pipeline.output / "rows/a/state").write_text("of the old data")
            assert self.run(pipeline, "a\t\n", **given)[1] == [*steps, "pretrain_headrank.py", "report"], variable
            assert (pipeline.output / "rows/a/state").read_text() == ""
            caches.append(cache())
            assert self.run(pipeline, "a\t\n", **given)[1] == ["report"]
        assert len(set(caches)) == 4
        train.write_text("q3\n")
        assert self.run(pipeline, "a\t\n", **given)[1] == ["pairs", "select-heads", "report"], (
            "the stand-in's pairs are the same, and so are the rows"
        )

    def test_an_unfinished_row_begins_anew_because_its_checkpoint_has_no_optimizer(self, pipeline):
        self.run(pipeline, "a\t\n", STOP_EARLY="1")
        (pipeline.output / "rows/a/state").write_text("a checkpoint")
        assert self.run(pipeline, "a\t\n")[1] == ["pretrain_headrank.py", "report"]
        assert (pipeline.output / "rows/a/state").read_text() == ""

    def test_the_examples_in_the_header_work(self):
        header = (ROOT / "launch/tune.sh").read_text().split("set -euo pipefail")[0]
        examples = [line.removeprefix("#   ") for line in header.splitlines() if line.startswith("#   ")]
        assert len(examples) == 2
        clean = {name: value for name, value in os.environ.items() if name not in ("VALID_QUERIES", "SETTINGS")}
        for example in examples:
            done = subprocess.run(
                ["bash", "-c", example], cwd=ROOT, env={**clean, "DRY_RUN": "1"}, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0 and "pretrain_headrank.py" in done.stdout, done.stderr

    @pytest.mark.parametrize(
        ("rows", "variables", "words"),
        [
            ("a --seed 3\n", {}, "a tab parts it from its flags"),
            ("../evil\t\n", {}, "'../evil' is no name"),
            ("a\t\na\t--lr 1\n", {}, "'a' is there twice"),
            ("# nothing\n", {}, "no rows"),
            ("a\t\n", {"JOBS": "0"}, "JOBS '0' is not a whole number"),
            ("a\t\n", {"ITERATIONS": "abc"}, "ITERATIONS 'abc' is not a whole number"),
            ("a\t\n", {"VALID_QUERIES": ""}, "VALID_QUERIES is missing"),
            ("a\t\n", {"COLLECTION": "nowhere"}, "no queries.tsv there"),
        ],
    )
    def test_a_mistake_is_one_line_before_anything_runs(self, pipeline, rows, variables, words):
        code, made, said = self.run(pipeline, rows, **variables)
        assert (code, made, len(said.splitlines())) == (2, [], 1) and words in said


def test_a_missing_output_is_made_again(pipeline):
    pipeline.run()
    (pipeline.output / "model/config.json").unlink()
    assert pipeline.run()[1] == ["export-hf"]


def test_interrupted_training_is_continued_not_begun_anew(pipeline):
    code, made, said = pipeline.run(STOP_EARLY="1")
    assert (code, made) == (3, WHOLE[:4]) and "start the pipeline again" in said
    (pipeline.output / "round-1/train/state").write_text("a checkpoint")
    assert pipeline.run()[:2] == (0, WHOLE[3:])
    assert (pipeline.output / "round-1/train/state").read_text() == "a checkpoint"


def test_a_second_round_trains_the_first_rounds_model_with_its_heads(pipeline):
    code, made, _ = pipeline.run("--rounds", "2")
    assert (code, made) == (0, [*WHOLE[:6], *WHOLE[3:6], "export-hf"])
    calls = pipeline.calls.read_text().splitlines()
    assert "--headrank-model embedded" in calls[3]
    assert f"--headrank-model {pipeline.output}/round-1/hf --headrank-heads {pipeline.output}/round-1/heads.json" in calls[6]
    assert f"--base {pipeline.output}/round-1/hf" in calls[-1] and f"--heads {pipeline.output}/round-2/heads.json" in calls[-1]


def test_given_heads_are_trained_and_not_selected_before(pipeline):
    given = pipeline.folder / "given.json"
    given.write_text("{}")
    assert pipeline.run(HEADS=str(given))[:2] == (0, [*WHOLE[:2], *WHOLE[3:]])
    assert f"--headrank-heads {given}" in pipeline.calls.read_text()
    assert f"--prompt-of {given} " in pipeline.calls.read_text(), "selected again with the prompt that was trained"
    assert pipeline.run(HEADS=str(given))[1] == []
    given.write_text("{ }")
    assert pipeline.run(HEADS=str(given))[1] == [*WHOLE[:2], *WHOLE[3:]], "other heads, another training"


def test_the_final_export_copies_what_the_last_round_wrote_unless_it_is_cut(pipeline):
    pipeline.run()
    last = pipeline.calls.read_text().splitlines()[-1]
    assert f"--exported {pipeline.output}/round-1/hf" in last and f"--heads {pipeline.output}/round-1/heads.json" in last
    pipeline.run(TRUNCATE="1")
    last = pipeline.calls.read_text().splitlines()[-1]
    assert f"--checkpoint {pipeline.output}/round-1/train/best --truncate" in last and "--exported" not in last
    pipeline.run(RESELECT="0")
    assert "--heads" not in pipeline.calls.read_text().splitlines()[-1], "the heads that were trained stay"


def test_without_held_out_queries_the_last_checkpoint_is_exported(pipeline):
    _, made, _ = pipeline.run(HELD_OUT="")
    calls = pipeline.calls.read_text()
    assert made == WHOLE[1:] and "--valid-data-path" not in calls and "/best" not in calls


def test_a_dry_run_prints_and_does_nothing(pipeline):
    code, made, said = pipeline.run("--bf16", DRY_RUN="1")
    assert (code, made) == (0, []) and "--bf16" in said and not pipeline.output.exists()


def test_a_wrong_number_of_rounds_is_refused(pipeline):
    assert pipeline.run("--rounds", "none")[0] == 2


def test_every_ablation_has_its_switches_and_one_table(pipeline):
    code, made, said = pipeline.run(script="ablations.sh")
    assert code == 0, said
    calls = pipeline.calls.read_text().splitlines()
    trainings = [call for call in calls if "pretrain_headrank.py" in call]
    assert len(trainings) == 7 and made.count("evaluate") == 2  # in the retriever's order and shuffled
    switches = ("--headrank-loss ranknet", "--headrank-all-heads", "--headrank-gamma 0 --headrank-eta 0", "--headrank-beta 0")
    for switch in switches:
        assert sum(switch in call for call in trainings) == 1, switch
    assert sum("--entropy-weight 0" in call for call in calls) == 2  # before and after training
    assert sum("--random-pairs" in call for call in calls) == 1
    table = calls[-1]
    assert all(
        f" {name}=" in table for name in ("untrained", "control", "full", "sft", "all-heads", "no-gate", "no-alps", "no-omega", "no-prox")
    )


def test_ablations_are_measured_again_when_what_is_measured_changes(pipeline):
    def run(**variables: str) -> list[str]:
        return pipeline.run(script="ablations.sh", VARIANTS="sft", **variables)[1]

    assert run() == [*WHOLE, "rerank", "rerank", "evaluate", "evaluate"]
    assert run() == ["evaluate", "evaluate"]
    assert run(EVAL_DEPTH="7") == ["rerank", "rerank", "evaluate", "evaluate"]
    assert run(EVAL_DEPTH="7", SHUFFLE="2") == ["rerank", "evaluate", "evaluate"], "in the retriever's order nothing changed"
    queries = pipeline.folder / "some.qids"
    queries.write_text("q1\n")
    given = {"EVAL_DEPTH": "7", "SHUFFLE": "2", "EVAL_QUERIES": str(queries)}
    assert run(**given) == ["rerank", "rerank", "evaluate", "evaluate"] and run(**given) == ["evaluate", "evaluate"]
    queries.write_text("q1\nq2\n")
    assert run(**given) == ["rerank", "rerank", "evaluate", "evaluate"], "the same name, other queries"
    assert run(**given, RESELECT="0") == ["export-hf", "rerank", "rerank", "evaluate", "evaluate"], "other heads in the same weights"


def test_the_settings_that_ablations_name_are_those_of_the_study():
    header = (ROOT / "launch/ablations.sh").read_text().split("settings of launch/results.sh:")[1].split("\n#\n")[0]
    study = (ROOT / "launch/results.sh").read_text()
    names = re.findall(r"\b[A-Z][A-Z_]+\b", header)
    assert len(names) == 9 and all(f"{name}=${{{name}:-" in study for name in names)
    assert all(flag in study for flag in re.findall(r"--lr-[^,;.]+", header))


def test_an_unknown_ablation_is_refused(pipeline):
    code, _, said = pipeline.run(script="ablations.sh", VARIANTS="full no-such")
    assert code == 2 and "no-such" in said


def test_heads_may_come_from_other_lists_than_the_training_queries(pipeline: Pipeline) -> None:
    other = pipeline.folder / "other"
    other.mkdir()
    for name in ("queries.tsv", "corpus.jsonl", "qrels.txt", "run.bm25.txt"):
        (other / name).write_text("y\n")

    def selections() -> list[str]:
        return [call for call in pipeline.calls.read_text().splitlines() if "select-heads" in call.split()]

    assert pipeline.run(SELECT_ON=str(other))[1] == WHOLE
    assert len(selections()) == 2 and all(f"--collection {other} " in call and "--hold-out" not in call for call in selections())
    assert pipeline.run(SELECT_ON=str(other))[1] == []
    (other / "qrels.txt").write_text("z\n")
    assert "select-heads" in pipeline.run(SELECT_ON=str(other))[1], "other judgements, other heads"
    pipeline.run(SELECT_ON="pairs")
    found = selections()
    assert len(found) == 2 and all(f"--contexts {pipeline.output}/pairs " in call and "--collection" not in call for call in found)
    code, made, printed = pipeline.run(SELECT_ON=str(pipeline.folder / "nowhere"))
    assert (code, made) == (2, []) and "SELECT_ON" in printed and "no queries.tsv there" in printed


def test_held_out_lists_have_flags_of_their_own(pipeline: Pipeline) -> None:
    pipeline.run(PAIRS_FLAGS="--sublists 3", HELD_OUT_FLAGS="--sublists 2")
    train, held_out = (call for call in pipeline.calls.read_text().splitlines() if "pairs" in call.split() and "select-heads" not in call)
    assert train.endswith("--sublists 3") and held_out.endswith("--sublists 2")


DEMO = ["select-heads", "pairs", "pretrain_headrank.py", "export-hf", "select-heads", "export-hf", "rerank", "rerank", "rerank"]
DEMO_LAST = ["evaluate", "report", "view", "examples/demo_table.py"]


class TestDemo:
    """launch/demo.sh with the same stand-in; its report is made beside the viewer, so the last calls have no order."""

    def run(self, pipeline: Pipeline, **variables: str) -> list[str]:
        """The steps that were made, without the measures and reports, which always are."""
        code, made, said = pipeline.run(script="demo.sh", **{"HELD_OUT": "", **variables})
        assert code == 0, said
        steps = [kind for kind in made if kind not in DEMO_LAST]
        assert sorted(made[len(steps) :]) == sorted(DEMO_LAST)
        return steps

    def test_a_second_demo_does_nothing(self, pipeline):
        assert self.run(pipeline) == DEMO
        assert self.run(pipeline) == []

    def test_less_free_memory_is_no_other_demo_but_a_number_that_is_given_is(self, pipeline):
        pipeline.machine(cores=2, gigabytes=16)
        self.run(pipeline)
        assert "--nproc-per-node 2 " in pipeline.calls.read_text()
        pipeline.machine(cores=2, gigabytes=4)
        assert self.run(pipeline, TP="1") == [], "make demo always gives TP"
        assert "pretrain_headrank.py" in self.run(pipeline, NPROC="1")
        assert "--nproc-per-node 1 " in pipeline.calls.read_text()
        assert "pretrain_headrank.py" in self.run(pipeline, TP="2")
        assert "--nproc-per-node 2 " in pipeline.calls.read_text()

    def test_a_stopped_demo_goes_on_and_so_keeps_its_optimizer(self, pipeline):
        code, made, _ = pipeline.run(script="demo.sh", HELD_OUT="", STOP_EARLY="1")
        assert (code, made) == (3, DEMO[:3]) and "--no-save-optim" not in pipeline.calls.read_text()
        (pipeline.output / "round-1/train/state").write_text("a checkpoint")
        assert self.run(pipeline) == DEMO[2:]
        assert (pipeline.output / "round-1/train/state").read_text() == "a checkpoint"

    def test_other_heads_in_the_same_weights_are_reranked_again(self, pipeline):
        self.run(pipeline)
        config = (pipeline.output / "model/config.json").stat().st_mtime_ns
        assert self.run(pipeline, PRUNE="0.5") == ["select-heads", "select-heads", "export-hf", "rerank", "rerank"], (
            "ICR's, for CoRe's heads, and HeadRank's"
        )
        assert (pipeline.output / "model/config.json").stat().st_mtime_ns == config
        assert "--method headrank" in pipeline.calls.read_text()

    def test_more_queries_to_select_on_select_again(self, pipeline):
        self.run(pipeline)
        assert (pipeline.output / "selection.qids").read_text() == "q1\tfirst\nq3\tsecond\n"
        assert self.run(pipeline, SELECTION_PER_TOPIC="2")[:1] == ["select-heads"]
        assert (pipeline.output / "selection.qids").read_text() == "q1\tfirst\nq2\tfirst\nq3\tsecond\n"
        assert self.run(pipeline, SELECTION_PER_TOPIC="2") == []
        (pipeline.folder / "collection/qrels.txt").write_text("other\n")
        assert self.run(pipeline, SELECTION_PER_TOPIC="2")[:1] == ["select-heads"]

    def test_a_dry_run_writes_nothing(self, pipeline):
        code, made, said = pipeline.run(script="demo.sh", HELD_OUT="", DRY_RUN="1")
        assert (code, made) == (0, []) and "pretrain_headrank.py" in said and not pipeline.output.exists()

    def test_a_wrong_number_is_one_line(self, pipeline):
        code, made, said = pipeline.run(script="demo.sh", SELECTION_PER_TOPIC="0")
        assert (code, made) == (2, []) and said == "demo.sh: SELECTION_PER_TOPIC '0' is not a whole number of at least 1\n"
