"""The whole plan of a study: candidates, recipes, cells, report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrank.errors import InputError
from headrank.experiments.phases import Command, Phase, check_plan
from headrank.experiments.plan import HEADRANK, Plan, RunPlaces, given
from headrank.experiments.plan_cells import PlannedCell, cells_folder, given_phases, plan_cells_of_study
from headrank.experiments.plan_heads import plan_heads
from headrank.experiments.plan_pairs import plan_pairs
from headrank.experiments.plan_training import plan_training
from headrank.experiments.recipe import Data, Recipe
from headrank.experiments.study import Report, Study
from headrank.experiments.study_file import LoadedStudy
from headrank.methods import METHODS, method_name

MAX_RANK_COLUMNS = 3  # of the page of one query


@dataclass(frozen=True)
class StudyPlan:
    """All phases of a study in an order that can be done, and its cells in the order of the file."""

    plan: Plan
    cells: tuple[PlannedCell, ...]

    @property
    def phases(self) -> list[Phase]:
        """What there is to do."""
        return self.plan.phases

    @property
    def pages(self) -> list[tuple[str, Path]]:
        """What a person will want to open, whether it is there or not."""
        output, study = self.plan.output, self.plan.loaded.study
        found = (
            [("report", output / "report" / ("training.md" if study.report.kind == "training" else "report.html"))]
            if study.report
            else []
        )
        found += [("viewer", output / "view.html")] if study.report and study.report.view else []
        return found + [(f"model {run.name}".strip(), run.final) for run in self.plan.runs if run.final is not None]


def plan_study(loaded: LoadedStudy) -> StudyPlan:
    """Everything that the file asks for. Nothing is written, and no file needs to be there yet."""
    plan = Plan(_with_places(loaded))
    _plan_retrieval(plan)
    _plan_recipes(plan)
    cells = tuple(plan_cells_of_study(plan))
    _plan_report(plan, cells)
    check_plan(plan.phases)
    return StudyPlan(plan, cells)


def _with_places(loaded: LoadedStudy) -> LoadedStudy:
    """Names of collections that the study retrieves, as the folders in which they will be."""
    study = loaded.study
    if study.retrieve is None:
        return loaded
    names = set(study.retrieve.topics)

    def placed(paths: list[Path]) -> list[Path]:
        return [study.output / "collections" / path if str(path) in names else path for path in paths]

    def recipe_of(recipe: Recipe) -> Recipe:
        data: Data = recipe.data.model_copy(update={"collections": placed(recipe.data.collections)})
        heads = recipe.heads
        if heads is not None and isinstance(heads.collections, list):
            heads = heads.model_copy(update={"collections": placed(heads.collections)})
        selections = {
            name: each.model_copy(update={"collections": placed(each.collections)}) if each.collections else each
            for name, each in recipe.selections.items()
        }
        return recipe.model_copy(update={"data": data, "heads": heads, "selections": selections})

    changed = recipe_of(study)
    assert isinstance(changed, Study)
    return replace(loaded, study=changed, recipes={name: recipe_of(recipe) for name, recipe in loaded.recipes.items()})


def _plan_recipes(plan: Plan) -> None:
    """All runs of the study."""
    for name, recipe in plan.loaded.recipes.items():
        plan.runs.append(_plan_run(plan, name, recipe))


def _plan_run(plan: Plan, run: str, recipe: Recipe) -> RunPlaces:
    if recipe.training is None and recipe.heads is None:
        if recipe.data.collections:
            plan_pairs(plan, run, recipe)
        return RunPlaces(run, recipe, None, None, None, None)
    if recipe.training is None:
        heads, phase = plan_heads(plan, run, recipe)
        return RunPlaces(run, recipe, heads, None, None, None, {"heads_before": phase})
    return plan_training(plan, run, recipe)


def _plan_retrieval(plan: Plan) -> None:
    retrieve = plan.loaded.study.retrieve
    if retrieve is None:
        return
    for name, qrels in retrieve.topics.items():
        folder = plan.output / "collections" / name
        words = [
            *HEADRANK,
            "retrieve",
            "--engine",
            "pyserini",
            "--index",
            retrieve.index,
            "--topics",
            name,
            "--qrels-name",
            qrels,
        ]
        words += ["--top-k", str(retrieve.depth), "--collection-output", str(folder)]
        settings = {"index": retrieve.index, "qrels": qrels, "depth": retrieve.depth}
        made = plan.artifact(f"retrieve/{name}", folder, settings, (), "run.bm25.txt")
        plan.add(Phase(f"retrieve/{name}", Command(tuple(words)), (made,), prints=True))


def _plan_report(plan: Plan, cells: tuple[PlannedCell, ...]) -> None:
    report = plan.loaded.study.report
    if report is None:
        return
    folder = plan.output / "report"
    words = [*HEADRANK, "report"]
    if report.kind == "training":
        trained = [phase for phase in plan.phases if phase.name.partition("/")[0] == "train"]
        words += ["--training", str(plan.output)]
        reads, needs = tuple(plan.stamp(phase.name) for phase in trained), tuple(phase.name for phase in trained)
    else:
        words += [f"--{report.kind}", str(cells_folder(plan))]
        reads = tuple(cells_folder(plan) / each.cell.folder / "metrics.json" for each in cells)
        needs = tuple(phase.name for phase in plan.phases if phase.name.startswith("cells/"))
    if report.heads:
        run = plan.runs[0]
        sets = [
            (name, path)
            for name, path in (("before", run.heads_before), ("after", run.heads_after))
            if path is not None
        ]
        words += ["--heads", *(f"{name}={path}" for name, path in sets)] if sets else []
        reads = (*reads, *(path for _, path in sets))
        needs = given_phases(*needs, run.phases.get("heads_before", ""), run.phases.get("heads_after", ""))
    if report.kind == "run" and cells:
        words += ["--collection", str(cells[0].cell.benchmark.collection)]
    words += ["--pool", *filter(None, [report.pool])] if report.pool is not None else []
    settings = {"kind": report.kind} | ({"pool": report.pool} if report.pool is not None else {})
    made = plan.artifact("report", folder, settings, reads)
    words += ["--output", str(folder)]
    plan.add(Phase("report", Command(tuple(words)), (made,), needs, prints=report.kind == "training"))
    if report.view is not None:
        _plan_view(plan, report, cells)


def _plan_view(plan: Plan, report: Report, cells: tuple[PlannedCell, ...]) -> None:
    """The page of one query: the final model's shading, and a column of ranks per attention method of that
    benchmark.
    """
    view, run = report.view, plan.runs[0]
    assert view is not None
    shown = [
        each
        for each in cells
        if each.cell.benchmark.name == view.benchmark and METHODS[each.cell.base_method].kind != "first-stage"
    ]
    if run.final is None or not shown:
        raise InputError(
            f"{plan.loaded.path}: report.view needs a trained model and rows on the benchmark '{view.benchmark}'"
        )
    first = next(
        (each for each in shown if each.cell.model is not None and each.cell.model.path == str(run.final)), shown[0]
    )
    others = [
        each
        for each in shown
        if each is not first and each.cell.depth == first.cell.depth and each.cell.order == first.cell.order
    ]
    columns = [first, *others][:MAX_RANK_COLUMNS]
    paths = {each: cells_folder(plan) / each.cell.folder / "run.txt" for each in columns}
    words = [*HEADRANK, "view", "--model", str(run.final), "--collection", str(first.cell.benchmark.collection)]
    words += ["--query", view.query, "--depth", str(first.cell.depth)]
    for each, path in paths.items():
        words += ["--ranks", f"{method_name(each.cell.method)}={path}"]
    output = plan.output / "view.html"
    made = plan.artifact("view", output, {"query": view.query}, (*given(run.final), *paths.values()))
    needs = [
        phase.name
        for phase in plan.phases
        if any(artifact.path.parent == path.parent for artifact in phase.artifacts for path in paths.values())
    ]
    plan.add(
        Phase("view", Command((*words, "--output", str(output))), (made,), given_phases(run.phases["final"], *needs))
    )
