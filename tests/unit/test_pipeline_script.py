"""launch/pipeline.sh with a stand-in for python: what runs, what is skipped, what is done again."""

from __future__ import annotations

import pytest

from tests.launcher_stand_in import WHOLE, Pipeline


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
        ("NPROC", "3", "NPROC '3' is not a multiple of TP (2)"),
        ("LR", "-1", "LR '-1' is not a number above 0"),
        ("LR", "0e3", "LR '0e3' is not a number above 0"),
        ("EPOCHS", "x", "EPOCHS 'x' is not a number above 0"),
        ("EPOCH_UNIT", "weeks", "EPOCH_UNIT 'weeks' is not one of: contexts pairs"),
        ("SEED", "x", "SEED 'x' is not a whole number of at least 0"),
        ("DRY_RUN", "yes", "DRY_RUN 'yes' is neither 0 nor 1"),
        ("RESELECT", "no", "RESELECT 'no' is neither 0 nor 1"),
        ("COLLECTION", "nowhere", "no queries.tsv there"),
        ("HELD_OUT", "nowhere.qids", "HELD_OUT 'nowhere.qids' is no file"),
        ("HEADS", "nowhere.json", "HEADS 'nowhere.json' is no file"),
    ],
)
def test_a_wrong_setting_is_one_line(pipeline, variable, value, words):
    code, made, said = pipeline.run(**({"TP": "2"} if variable == "NPROC" else {}) | {variable: value})
    assert (code, made, len(said.splitlines())) == (2, [], 1) and words in said


@pytest.mark.parametrize(("flags", "words"), [(["--rounds"], "--rounds needs a number"), (["runs/x", "--bf16"], "'runs/x' is no flag")])
def test_a_wrong_call_is_one_line(pipeline, flags, words):
    code, made, said = pipeline.run(*flags)
    assert (code, made, len(said.splitlines())) == (2, [], 1) and words in said


@pytest.mark.parametrize("value", ["1e-4", "0.5", ".5", "3", "1.", "2E+1"])
def test_every_spelling_of_a_number_is_one(pipeline, value):
    assert pipeline.run(LR=value, EPOCHS=value, DRY_RUN="1")[0] == 0


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
    assert f"--prompt-of {pipeline.output}/round-1/hf " in pipeline.calls.read_text(), "selected again with the prompt that was trained"
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
