"""From a recipe to phases: the plan that every part adds to, the training lists, and what the parts have in common.

What a run does not change it shares: an artefact lies in OUTPUT when its settings are those of the recipe, else in
OUTPUT/RUN. Each phase names the settings and files that decide what it makes, and nothing else; so a new learning rate
makes trainings stale, and neither pairs nor heads.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrank.artifacts import Artifact
from headrank.experiments import machine
from headrank.experiments.phases import STAMPS, Phase
from headrank.experiments.recipe import Recipe, Settings
from headrank.experiments.study_file import LoadedStudy

HEADRANK = (sys.executable, "-m", "headrank")
COMPLETE = "training_complete.json"  # pretrain_headrank.py writes it last
_NO_INFLUENCE = {"save_interval", "keep_checkpoints", "picture", "shared_reference"}  # settings that change no number
COLLECTION_FILES = ("queries.tsv", "qrels.txt", "run.bm25.txt", "corpus.jsonl")
# by name: the folder also holds a cache of tokens, which decides nothing
PAIRS_FILES = ("contexts.jsonl", "pairs.jsonl")


@dataclass(frozen=True)
class RunPlaces:
    """Where the artefacts of one run lie, and the phase that makes each."""

    name: str
    recipe: Recipe
    heads_before: Path | None
    trained: Path | None
    heads_after: Path | None
    final: Path | None
    phases: dict[str, str] = field(default_factory=dict)  # heads_before, trained, heads_after, final -> phase
    train_folder: Path | None = None
    # kept checkpoint -> (its model, the phase that makes it)
    steps: dict[int, tuple[Path, str]] = field(default_factory=dict)


@dataclass
class Plan:
    """The phases of a study so far, in an order that can be done."""

    loaded: LoadedStudy
    phases: list[Phase] = field(default_factory=list)
    runs: list[RunPlaces] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The study's folder."""
        return self.loaded.study.output

    @property
    def base(self) -> Recipe:
        """The recipe without the changes of a run."""
        return self.loaded.study

    def stamp(self, phase: str) -> Path:
        """The stamp of a phase, or of one of several things that it makes."""
        return self.output / STAMPS / f"{phase}.json"

    def artifact(
        self, phase: str, path: Path, settings: dict[str, Any], reads: tuple[Path, ...] = (), marker: str = ""
    ) -> Artifact:
        """What a phase makes at ``path``."""
        return Artifact(path, self.stamp(phase), settings, reads, marker)

    def add(self, phase: Phase) -> str:
        """Add a phase unless it is there (runs share phases); returns its name."""
        if all(phase.name != other.name for other in self.phases):
            self.phases.append(phase)
        return phase.name

    def shared(self, kind: str, run: str, same: bool) -> tuple[str, Path]:
        """The phase's name and folder: the study's own where the settings are the recipe's, else the run's."""
        return (f"{kind}/{run}", self.output / run) if run and not same else (kind, self.output)


def dump(settings: Settings | None, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Settings as plain values for a stamp: defaults and what changes no number are left out."""
    return (
        {}
        if settings is None
        else settings.model_dump(mode="json", exclude_defaults=True, exclude=_NO_INFLUENCE | set(without))
    )


def flags_of(settings: Settings, *, without: Collection[str] = ()) -> list[str]:
    """Settings as flags: --depth 20 --judged-only; false and null give none."""
    words: list[str] = []
    for name, value in settings.model_dump(mode="json", exclude_none=True).items():
        if name in without or value is False or (value == 0 and name == "sublists"):
            continue
        values = [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
        words += [f"--{name.replace('_', '-')}", *values]
    return words


def collection_reads(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The files of collections that decide lists, plain or compressed: one of the two is missing, which is a state
    like others.
    """
    return tuple(folder / f"{name}{end}" for folder in folders for name in COLLECTION_FILES for end in ("", ".gz"))


def collection_files(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The files that a collection must have."""
    return tuple(folder / name for folder in folders for name in COLLECTION_FILES)


def labelled_files(recipe: Recipe) -> tuple[Path, ...]:
    """The files that the training collections must have: with labels no judgements."""
    files = collection_files(recipe.data.collections)
    return files if recipe.labels is None else tuple(path for path in files if path.name != "qrels.txt")


def pairs_reads(folder: Path | None) -> tuple[Path, ...]:
    """The files of a folder of `headrank pairs`."""
    return () if folder is None else tuple(folder / name for name in PAIRS_FILES)


def collection_flags(folders: Sequence[Path]) -> list[str]:
    """--collection for each."""
    return [word for folder in folders for word in ("--collection", str(folder))]


def model_reads(model: str) -> tuple[Path, ...]:
    """A model in a folder is read from there; a name on the hub, or 'embedded', stands for itself."""
    return (Path(model),) if Path(model).is_dir() else ()


def given(*paths: Path | None) -> tuple[Path, ...]:
    """Those that are there to be given."""
    return tuple(path for path in paths if path is not None)


def _choice(plan: Plan, tensor_parallel: int) -> Path:
    return plan.output / STAMPS / f"processes.tp{tensor_parallel}"


def processes_of(plan: Plan, recipe: Recipe) -> int:
    """The number of training processes; what 'auto' chose once is kept for the study."""
    training = recipe.training
    assert training is not None
    if training.processes != "auto":
        return training.processes
    return machine.choose_processes(_choice(plan, training.tensor_parallel), training.tensor_parallel)


def remember_choices(plan: Plan) -> None:
    """Keep what 'auto' stands for in this study, from its first run on."""
    for recipe in plan.loaded.recipes.values():
        if recipe.training is not None and recipe.training.processes == "auto":
            size = recipe.training.tensor_parallel
            machine.remember_processes(_choice(plan, size), processes_of(plan, recipe))
