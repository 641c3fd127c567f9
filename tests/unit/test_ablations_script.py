"""launch/ablations.sh with a stand-in for python: a switch for every row, and measured again when what is measured changes."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.launcher_stand_in import ROOT, WHOLE


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VARIANTS", "full odd", "unknown variant 'odd'"),
        ("HEADS", "x", "HEADS is set"),
        ("DTYPE", "half", "DTYPE 'half' is not one of"),
        ("SHUFFLE", "abc", "SHUFFLE 'abc' is not a whole number"),
        ("EVAL", "{collection} {other}/", "EVAL, by the names of its folders: collection is there twice"),
        ("LAYOUT", "diagonal", "LAYOUT 'diagonal' is not one of: sequential parallel"),
    ],
)
def test_ablations_refuse_before_anything_is_trained(pipeline, variable, value, words):
    other = shutil.copytree(pipeline.folder / "collection", pipeline.folder / "other" / "collection")
    value = value.format(collection=pipeline.folder / "collection", other=other)
    code, made, said = pipeline.run(script="ablations.sh", **{variable: value})
    assert (code, made) == (2, []) and words in said


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


def test_without_reselection_there_is_no_control_and_the_precision_of_reranking_is_passed_on(pipeline):
    code, _, said = pipeline.run(script="ablations.sh", VARIANTS="full", RESELECT="0", DTYPE="bfloat16", SHUFFLE="")
    assert code == 0, said
    calls = pipeline.calls.read_text().splitlines()
    measured = [call for call in calls if " rerank " in call]
    assert len(measured) == 2 and all("--dtype bfloat16" in call for call in measured)
    assert " untrained=" in calls[-1] and " full=" in calls[-1] and "control=" not in calls[-1]


def test_side_by_side_every_row_is_trained_and_the_untrained_one_read_so(pipeline):
    code, _, said = pipeline.run(script="ablations.sh", VARIANTS="full no-omega", RESELECT="0", SHUFFLE="", LAYOUT="parallel")
    assert code == 0, said
    calls = pipeline.calls.read_text().splitlines()
    trainings = [call for call in calls if "pretrain_headrank.py" in call]
    assert len(trainings) == 2 and all("--headrank-document-layout parallel" in call for call in trainings)
    (untrained,) = [call for call in calls if " rerank " in call and "/heads.json" in call]
    assert "--document-layout parallel" in untrained
    assert not any("--document-layout" in call for call in calls if "select-heads" in call), "heads come from the paper's prompt"


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
    assert len(names) == 12 and all(f"{name}=${{{name}:-" in study for name in names)
    flags = re.findall(r"--[a-z0-9-]+", header.split("and give its")[1])
    assert len(flags) == 5 and all(flag in study for flag in flags)


def test_an_unknown_ablation_is_refused(pipeline):
    code, _, said = pipeline.run(script="ablations.sh", VARIANTS="full no-such")
    assert code == 2 and "no-such" in said
