"""The phases of a study that trains on a teacher's scores: labels of every collection, and a readout fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrank.experiments.phases import Command, Phase
from headrank.experiments.plan import (
    HEADRANK,
    Plan,
    collection_flags,
    collection_reads,
    dump,
    flags_of,
    given,
    labelled_files,
    model_reads,
)
from headrank.experiments.recipe import Labels, ReadoutFit, Recipe

_NO_INFLUENCE = ("only", "folder", "max_minutes")


@dataclass(frozen=True)
class LabelRuns:
    """The labels of the training collections: flags, the runs, the phases that make them, or files that nobody
    makes.
    """

    runs: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()
    external: tuple[Path, ...] = ()

    @property
    def flags(self) -> list[str]:
        """--labels RUN for every collection, in their order."""
        return [word for run in self.runs for word in ("--labels", str(run))]


def plan_labels(plan: Plan, run: str, recipe: Recipe) -> LabelRuns:
    """A phase `label/COLLECTION` for every training collection; a folder of runs needs none."""
    labels, collections = recipe.labels, recipe.data.collections
    if labels is None:
        return LabelRuns()
    if labels.folder is not None:
        runs = tuple(_run_in(labels.folder, folder.name) for folder in collections)
        return LabelRuns(runs, external=runs)
    kind, place = plan.shared("label", run, labels == plan.base.labels)
    runs = tuple(place / "labels" / f"{folder.name}.teacher.trec" for folder in collections)
    needs = tuple(
        _plan_label(plan, f"{kind}/{folder.name}", labels, folder, path)
        for folder, path in zip(collections, runs, strict=True)
    )
    return LabelRuns(runs, needs)


def _run_in(folder: Path, collection: str) -> Path:
    """The run of a collection, as `headrank pairs --labels FOLDER` finds it; a name that says what is missing where
    there is none.
    """
    return next(iter(sorted(folder.glob(f"{collection}.*.trec"))), folder / f"{collection}.teacher.trec")


def _plan_label(plan: Plan, phase: str, labels: Labels, folder: Path, output: Path) -> str:
    assert labels.teacher is not None
    only = labels.only.get(folder.name)
    words = [*HEADRANK, "label", "--collection", str(folder), *flags_of(labels, without=("only", "folder"))]
    words += ["--only", str(only)] if only is not None else []
    reads = (*collection_reads([folder]), *given(only), *model_reads(labels.teacher))
    made = plan.artifact(phase, output, {"labels": dump(labels, without=_NO_INFLUENCE)}, reads)
    external = (folder / "queries.tsv", folder / "corpus.jsonl", folder / "run.bm25.txt", *given(only))
    return plan.add(Phase(phase, Command((*words, "--output", str(output))), (made,), external=external, prints=True))


def plan_readout(
    plan: Plan,
    run: str,
    recipe: Recipe,
    phase: str,
    output: Path,
    model: str,
    *,
    needs: Sequence[str] = (),
    prompt_of: Path | None = None,
) -> tuple[Path, str]:
    """Fit a readout of ``model``: before training, or on the trained model in its prompt (``prompt_of``)."""
    assert recipe.heads is not None and recipe.heads.readout is not None
    fit: ReadoutFit = recipe.heads.readout
    labels, data = plan_labels(plan, run, recipe), recipe.data
    left_out = ["--hold-out", str(data.held_out_queries)] if data.held_out_queries is not None else []
    chosen = ["--only", str(data.train_queries)] if data.train_queries is not None else left_out
    words = [
        *HEADRANK,
        "select-heads",
        "--method",
        "readout",
        "--model",
        model,
        *collection_flags(data.collections),
        *labels.flags,
    ]
    words += [*chosen, "--depth", str(recipe.heads.depth), *flags_of(fit), *flags_of(recipe.prompt), "--no-picture"]
    words += ["--prompt-of", str(prompt_of)] if prompt_of is not None else []
    words += ["--cache", str(plan.output / "readout-statistics"), "--output", str(output)]
    settings = {
        "readout": dump(fit),
        "depth": recipe.heads.depth,
        "prompt": dump(recipe.prompt),
        "data": dump(data),
        "model": model,
    }
    queries = given(data.train_queries, data.held_out_queries, fit.folds)
    trained = model_reads(model) if prompt_of is None else (prompt_of,)
    made = plan.artifact(
        phase, output, settings, (*collection_reads(data.collections), *labels.runs, *queries, *trained)
    )
    every = tuple(dict.fromkeys((*needs, *labels.needs)))
    external = (*queries, *labels.external, *labelled_files(recipe))
    return output, plan.add(Phase(phase, Command(tuple(words)), (made,), every, external, prints=True))
