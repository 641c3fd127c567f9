"""launch/pipeline.sh and launch/ablations.sh with a stand-in for python: what runs, what is skipped, what is done again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
output= save=
args=("$@")
for ((i = 0; i < ${#args[@]}; i++)); do
    case ${args[i]} in --output) output=${args[i+1]} ;; --save) save=${args[i+1]} ;; esac
done
case " $* " in
    *" pairs "*) mkdir -p "$output" && touch "$output/pairs.summary.json" ;;
    *" select-heads "*) touch "$output" ;;
    *" export-hf "*) mkdir -p "$output" && touch "$output/config.json" ;;
    *" rerank "*) mkdir -p "$(dirname "$output")" && touch "$output" ;;
    *pretrain_headrank.py*) mkdir -p "$save" && touch "$save/state"
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
        python = folder / "python"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def run(self, *flags: str, script: str = "pipeline.sh", **variables: str) -> tuple[int, list[str], str]:
        """Exit code, the kinds of the calls made, and what was printed."""
        self.calls.write_text("")
        settings = {"COLLECTION": str(self.folder / "collection"), "OUTPUT": str(self.output), "HELD_OUT": str(self.folder / "held.qids")}
        environment = {**os.environ, **settings, "PYTHON": str(self.folder / "python"), "CALLS": str(self.calls), **variables}
        done = subprocess.run([ROOT / "launch" / script, *flags], env=environment, capture_output=True, text=True, check=False)
        kinds = ("pairs", "select-heads", "pretrain_headrank.py", "export-hf", "rerank", "evaluate", "report")
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
