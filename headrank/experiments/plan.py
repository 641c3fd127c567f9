"""From a recipe to phases: pairs, heads, training, heads again, export, for every run of a study.

What a run does not change it shares: an artefact lies in OUTPUT when its settings are those of the recipe, else in OUTPUT/RUN.
Each phase names the settings and files that decide what it makes, and nothing else; so a new learning rate makes trainings stale,
and neither pairs nor heads.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrank.artifacts import Artifact
from headrank.experiments import machine
from headrank.experiments.phases import STAMPS, Call, Command, Phase
from headrank.experiments.selection_queries import write_selection_queries
from headrank.experiments.study import Heads, Pairs, Recipe, Settings
from headrank.experiments.study_file import LoadedStudy

HEADRANK = (sys.executable, "-m", "headrank")
COMPLETE = "training_complete.json"  # pretrain_headrank.py writes it last
_NO_INFLUENCE = {"save_interval", "keep_checkpoints", "picture", "shared_reference"}  # settings that change no number
COLLECTION_FILES = ("queries.tsv", "qrels.txt", "run.bm25.txt", "corpus.jsonl")
PAIRS_FILES = ("contexts.jsonl", "pairs.jsonl")  # by name: the folder also holds a cache of tokens, which decides nothing


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
    steps: dict[int, tuple[Path, str]] = field(default_factory=dict)  # kept checkpoint -> (its model, the phase that makes it)


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

    def artifact(self, phase: str, path: Path, settings: dict[str, Any], reads: tuple[Path, ...] = (), marker: str = "") -> Artifact:
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
    return {} if settings is None else settings.model_dump(mode="json", exclude_defaults=True, exclude=_NO_INFLUENCE | set(without))


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
    """The files of collections that decide lists, plain or compressed: one of the two is missing, which is a state like others."""
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


def plan_recipes(plan: Plan) -> None:
    """All runs of the study."""
    for name, recipe in plan.loaded.recipes.items():
        plan.runs.append(_plan_run(plan, name, recipe))


def _plan_run(plan: Plan, run: str, recipe: Recipe) -> RunPlaces:
    if recipe.training is None and recipe.heads is None:
        plan_pairs(plan, run, recipe)
        return RunPlaces(run, recipe, None, None, None, None)
    if recipe.training is None:
        heads, phase = plan_heads(plan, run, recipe)
        return RunPlaces(run, recipe, heads, None, None, None, {"heads_before": phase})
    from headrank.experiments.plan_training import plan_training

    return plan_training(plan, run, recipe)


def plan_pairs(plan: Plan, run: str, recipe: Recipe, kind: str = "pairs") -> tuple[Path, str]:
    """The training lists, or with kind 'held-out' the lists that checkpoints are judged by."""
    data, base = recipe.data, plan.base
    is_held_out = kind == "held-out"
    pairs = _held_out_pairs(recipe) if is_held_out else recipe.pairs
    same = (data, recipe.labels, pairs) == (base.data, base.labels, _held_out_pairs(base) if is_held_out else base.pairs)
    from headrank.experiments.plan_readout import plan_labels

    labels = plan_labels(plan, run, recipe)
    phase, folder = plan.shared(kind, run, same)
    chosen = ["--only", str(data.held_out_queries)] if is_held_out else _training_queries(recipe)
    queries = given(data.train_queries, data.held_out_queries)
    words = [*HEADRANK, "pairs", *collection_flags(data.collections), *labels.flags, *chosen, *flags_of(pairs)]
    if plan.loaded.study.compare_paper:
        words.append("--compare-paper")
    output = folder / kind
    settings = {"pairs": dump(pairs), "data": dump(data)}
    reads = (*collection_reads(data.collections), *labels.runs, *queries)
    made = plan.artifact(phase, output, settings, reads, "pairs.summary.json")
    retrieved = tuple(other.name for other in plan.phases if other.name.startswith("retrieve/"))
    needs = (*retrieved, *labels.needs)
    external = (*queries, *labels.external, *(() if retrieved else labelled_files(recipe)))
    action = Command((*words, "--output", str(output)))
    return output, plan.add(Phase(phase, action, (made,), needs, external, prints=True))


def _held_out_pairs(recipe: Recipe) -> Pairs:
    return recipe.held_out_pairs or recipe.pairs


def _training_queries(recipe: Recipe) -> list[str]:
    if recipe.data.train_queries is not None:
        return ["--only", str(recipe.data.train_queries)]
    return ["--hold-out", str(recipe.data.held_out_queries)] if recipe.data.held_out_queries is not None else []


def plan_heads(plan: Plan, run: str, recipe: Recipe) -> tuple[Path, str]:
    """Head selection before training: (the heads that training uses, the phase)."""
    heads = recipe.heads
    assert heads is not None
    if heads.file is not None:
        return heads.file, ""
    if heads.readout is not None:
        from headrank.experiments.plan_readout import plan_readout

        phase, folder = plan.shared("heads", run, _same_heads(recipe, plan.base))
        return plan_readout(plan, run, recipe, phase, folder / "heads.json", recipe.model)
    attention = [method for method in heads.methods if method != "niah"]
    if not attention:
        return heads_path(plan, run, recipe, "niah"), plan_needles(plan, run, recipe)
    phase, folder = selection_phase(plan, run, recipe), heads_path(plan, run, recipe, attention[0]).parent
    lists = selection_lists(plan, run, recipe)
    words = [*HEADRANK, "select-heads", "--method", *attention, "--model", recipe.model, *lists.flags, *selection_flags(plan, heads)]
    output = folder / "heads.json"
    settings = _head_settings(recipe)
    reads = (*lists.reads, *model_reads(recipe.model))
    paths = {method: heads_path(plan, run, recipe, method) for method in attention}
    made = tuple(plan.artifact(f"{phase}.{method}", path, settings, reads) for method, path in paths.items())
    action = Command((*words, *flags_of(recipe.prompt), "--output", str(output)))
    plan.add(Phase(phase, action, made, lists.needs, lists.external, prints=True))
    if "niah" in heads.methods:
        plan_needles(plan, run, recipe)
    return paths[attention[0]], phase


def heads_path(plan: Plan, run: str, recipe: Recipe, method: str) -> Path:
    """The file of one selection method: heads.json alone, heads.METHOD.json beside others."""
    assert recipe.heads is not None
    _, folder = plan.shared("heads", run, _same_heads(recipe, plan.base))
    is_alone = len([other for other in recipe.heads.methods if other != "niah"]) == 1 and method != "niah"
    return folder / ("heads.json" if is_alone else f"heads.{method}.json")


def plan_needles(plan: Plan, run: str, recipe: Recipe) -> str:
    """NIAH's heads, from needles in the passages of the first training collection."""
    heads = recipe.heads
    assert heads is not None
    phase = needles_phase(plan, run, recipe)
    output, collection = heads_path(plan, run, recipe, "niah"), recipe.data.collections[:1]
    words = [*HEADRANK, "select-heads", "--method", "niah", "--model", recipe.model, *collection_flags(collection)]
    words += ["--needles", str(heads.needles), *flags_of(recipe.prompt), "--output", str(output)]
    settings = {"model": recipe.model, "prompt": dump(recipe.prompt), "needles": heads.needles}
    reads = (*collection_reads(collection)[-2:], *model_reads(recipe.model))
    made = plan.artifact(phase, output, settings, reads)
    retrieved = tuple(other.name for other in plan.phases if other.name.startswith("retrieve/"))
    external = () if retrieved else collection_files(collection)[-1:]
    return plan.add(Phase(phase, Command((*words,)), (made,), retrieved, external, prints=True))


def selection_phase(plan: Plan, run: str, recipe: Recipe) -> str:
    """The phase that selects a run's heads by attention."""
    return plan.shared("heads", run, _same_heads(recipe, plan.base))[0]


def needles_phase(plan: Plan, run: str, recipe: Recipe) -> str:
    """The phase that selects a run's heads by needles."""
    return plan.shared("needles", run, _same_heads(recipe, plan.base))[0]


def _head_settings(recipe: Recipe) -> dict[str, Any]:
    values = {"model": recipe.model, "prompt": dump(recipe.prompt), "heads": dump(recipe.heads), "data": dump(recipe.data)}
    values |= {"labels": dump(recipe.labels)} if recipe.labels is not None else {}
    return values | ({"pairs": dump(recipe.pairs)} if recipe.heads is not None and recipe.heads.collections == "pairs" else {})


def _same_heads(recipe: Recipe, base: Recipe) -> bool:
    return _head_settings(recipe) == _head_settings(base)


@dataclass(frozen=True)
class SelectionLists:
    """The lists that heads are selected on: flags, files read, phases needed, files that nobody makes."""

    flags: tuple[str, ...]
    reads: tuple[Path, ...]
    needs: tuple[str, ...] = ()
    external: tuple[Path, ...] = ()


def selection_lists(plan: Plan, run: str, recipe: Recipe) -> SelectionLists:
    """Those of the settings: the training lists, other collections, or the training collections and queries."""
    heads = recipe.heads or Heads()
    if heads.collections == "pairs":
        folder, phase = plan_pairs(plan, run, recipe)
        return SelectionLists(("--contexts", str(folder)), pairs_reads(folder), (phase,))
    folders = heads.collections or recipe.data.collections
    queries = heads.queries or (recipe.data.train_queries if heads.collections is None else None)
    flags, needs = collection_flags(folders), tuple(phase.name for phase in plan.phases if phase.name.startswith("retrieve/"))
    external = () if needs else collection_files(folders)
    if heads.queries_per_topic is not None and queries is not None:
        queries, phase = _plan_selection_queries(plan, queries, heads.queries_per_topic)
        needs = (*needs, phase)
    else:
        external = (*external, *given(queries))
    if queries is not None:
        flags += ["--only", str(queries)]
    elif heads.collections is None:
        flags += _training_queries(recipe)
    return SelectionLists(tuple(flags), (*collection_reads(folders), *given(queries)), needs, external)


def _plan_selection_queries(plan: Plan, queries: Path, per_topic: int) -> tuple[Path, str]:
    output = plan.output / "selection.qids"
    call = Call(write_selection_queries, (queries, per_topic, output), f"{per_topic} query per topic of {queries} into {output}")
    made = plan.artifact("selection-queries", output, {"queries_per_topic": per_topic}, (queries,))
    return output, plan.add(Phase("selection-queries", call, (made,), external=(queries,)))


def selection_flags(plan: Plan, heads: Heads) -> list[str]:
    """The flags of `headrank select-heads` that are the same before and after training."""
    words = ["--permutations", str(heads.permutations), "--cache", str(plan.output / "head-statistics")]
    words += [] if heads.collections == "pairs" else ["--depth", str(heads.depth)]
    words += [] if heads.retriever_order else ["--no-retriever-order"]
    words += [] if heads.picture else ["--no-picture"]
    words += ["--per-query"] if heads.per_query else []
    for name in ("prune", "top_k", "temperature", "entropy_weight", "contrast", "gold_grade"):
        value = getattr(heads, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None and not (name == "prune" and value == 0) else []
    return words


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
