"""The studies that come with the project: their trainings are what their headers promise, for the real parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrank.experiments.phases import Command
from headrank.experiments.plan_study import StudyPlan, plan_study
from headrank.experiments.study_file import read_study
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import config_from

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PAPER = {"0.6b": (4, 1e-5), "1.7b": (4, 5e-6), "4b": (8, 2e-6)}


def plan_of(name: str) -> StudyPlan:
    return plan_study(read_study(CONFIGS / f"{name}.yaml"))


def trainings(plan: StudyPlan, world_size: int = 1) -> dict[str, dict[str, object]]:
    """Run -> everything that its training is configured by."""
    found = {}
    for phase in plan.phases:
        if phase.name.partition("/")[0] == "train":
            assert isinstance(phase.action, Command)
            words = list(phase.action.words)
            place = next(number for number, word in enumerate(words) if word.endswith("pretrain_headrank.py"))
            config = config_from(parse_arguments(words[place + 1 :]), world_size=world_size)
            found[phase.name.partition("/")[2]] = {**vars(config), **vars(config.loss), **vars(config.schedule)}
    return found


@pytest.mark.parametrize("size", PAPER)
def test_the_papers_studies_train_with_the_papers_settings(size: str) -> None:
    tensor_parallel, lr = PAPER[size]
    configs = trainings(plan_of(f"paper_qwen3_{size}"), world_size=8)
    config = configs["full" if size == "0.6b" else ""]
    assert len(configs) == (7 if size == "0.6b" else 1), "the ablations are at the smallest size"
    wanted = {
        "tensor_parallel": tensor_parallel,
        "lr": lr,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "pairs_per_context": 1,
    }
    wanted |= {"clip_grad": 5.0, "epochs": 1.0, "epoch_unit": "pairs", "linear_weight": 0.05, "proximal_weight": 0.05}
    wanted |= {"permutations": 0, "document_layout": "sequential", "keep_iters": (1800, 2200, 2800), "stop_after": None}
    wanted |= {"bf16": True, "use_distributed_optimizer": True, "exit_signal_handler": True}
    assert {name: config[name] for name in wanted} == wanted


def test_the_papers_studies_have_its_benchmarks_at_their_depths_and_its_methods() -> None:
    from data_tools.benchmarks import BENCHMARKS
    from headrank.methods import METHODS

    plan = plan_of("paper_qwen3_0.6b")
    assert {each.cell.benchmark.name: each.cell.depth for each in plan.cells} == {
        name: known.depth for name, known in BENCHMARKS.items()
    }
    assert {each.cell.base_method for each in plan.cells} == set(METHODS)


def test_every_run_of_the_tuning_changes_one_thing() -> None:
    configs = trainings(plan_of("tune"))
    assert len(configs) > 10
    for name, values in configs.items():
        changed = {key for key, value in values.items() if value != configs["default"][key]} - {
            "save",
            "loss",
            "schedule",
            "has_own_scale",
        }
        # Omega has two weights, a scaling may come with a scale of its own
        alone = len(changed) == (name != "default")
        assert alone or changed in ({"entropy_weight", "variance_weight"}, {"scaling", "scale"}), (name, changed)


def test_the_ablations_are_the_papers_rows() -> None:
    from headrank.evaluation.published import TABLE_3, published_numbers

    rows = {number.method for number in published_numbers() if number.table == TABLE_3}
    plan = plan_of("ablations")
    assert rows <= {each.cell.method for each in plan.cells}
    configs = trainings(plan)
    assert configs["no-prox"]["proximal_weight"] == 0 and configs["no-omega"]["entropy_weight"] == 0
    assert configs["sft"]["objective"] == "ranknet" and configs["full"]["objective"] != "ranknet"


def test_the_readout_ablations_change_what_their_names_say() -> None:
    configs = trainings(plan_of("readout_ablations"))
    assert {name for name, values in configs.items() if values["in_batch_weight"] == 0} == {
        "no-in-batch",
        "parallel",
        "sequential",
        "mass",
    }
    assert {name for name, values in configs.items() if not values["train_readout"]} == {
        "fixed-readout",
        "training-only",
        "mass",
    }
    commands = [
        phase.action.words for phase in plan_of("readout_ablations").phases if isinstance(phase.action, Command)
    ]
    fits = [list(words) for words in commands if "select-heads" in words]
    layouts = [words[words.index("--document-layout") + 1] for words in fits if "readout" in words]
    assert sorted(layouts) == ["late", "late", "parallel", "sequential"], (
        "one fit for all runs with the readout of the recipe"
    )
    assert sum("--equal-weights" in words for words in fits) == 1 and sum("readout" not in words for words in fits) == 1


def test_the_studys_training_sees_no_test_collection() -> None:
    plan = plan_of("study")
    tests = {str(each.cell.benchmark.collection) for each in plan.cells}
    for phase in plan.phases:
        if isinstance(phase.action, Command) and phase.name.partition("/")[0] != "report":
            assert not tests & set(phase.action.words), phase.name


def test_the_cells_of_the_study_are_those_of_the_results_page() -> None:
    """Names of model and method in results/, which docs/results_tables.py reads."""
    from headrank.experiments.cell_archive import read_archive

    archived = {
        (cell.model, cell.method, cell.metrics.get("seed")) for cell in read_archive(CONFIGS.parent / "results")
    }
    for each in plan_of("study").cells:
        model = each.cell.model
        assert (model.name if model else "", each.cell.method, model.seed if model else None) in archived, each.cell
