"""The phases of head selection: by attention, by needles, or as a readout; and the lists that heads are selected on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.experiments.phases import Call, Command, Phase
from headrank.experiments.plan import (
    HEADRANK,
    Plan,
    collection_files,
    collection_flags,
    collection_reads,
    dump,
    flags_of,
    given,
    model_reads,
    pairs_reads,
)
from headrank.experiments.plan_pairs import plan_pairs, training_queries
from headrank.experiments.plan_readout import plan_readout
from headrank.experiments.recipe import Heads, Recipe
from headrank.experiments.selection_queries import write_selection_queries


def plan_heads(plan: Plan, run: str, recipe: Recipe) -> tuple[Path, str]:
    """Head selection before training: (the heads that training uses, the phase)."""
    heads = recipe.heads
    assert heads is not None
    if heads.file is not None:
        return heads.file, ""
    if heads.readout is not None:
        phase, folder = plan.shared("heads", run, _same_heads(recipe, plan.base))
        return plan_readout(plan, run, recipe, phase, folder / "heads.json", recipe.model)
    attention = [method for method in heads.methods if method != "niah"]
    if not attention:
        return heads_path(plan, run, recipe, "niah"), plan_needles(plan, run, recipe)
    phase, folder = selection_phase(plan, run, recipe), heads_path(plan, run, recipe, attention[0]).parent
    lists = selection_lists(plan, run, recipe)
    words = [
        *HEADRANK,
        "select-heads",
        "--method",
        *attention,
        "--model",
        recipe.model,
        *lists.flags,
        *selection_flags(plan, heads),
    ]
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
    # names stay what they were before several methods could be selected at once: files and studies refer to heads.json
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
    values = {
        "model": recipe.model,
        "prompt": dump(recipe.prompt),
        "heads": dump(recipe.heads),
        "data": dump(recipe.data),
    }
    values |= {"labels": dump(recipe.labels)} if recipe.labels is not None else {}
    return values | (
        {"pairs": dump(recipe.pairs)} if recipe.heads is not None and recipe.heads.collections == "pairs" else {}
    )


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
    flags, needs = (
        collection_flags(folders),
        tuple(phase.name for phase in plan.phases if phase.name.startswith("retrieve/")),
    )
    external = () if needs else collection_files(folders)
    if heads.queries_per_topic is not None and queries is not None:
        queries, phase = _plan_selection_queries(plan, queries, heads.queries_per_topic)
        needs = (*needs, phase)
    else:
        external = (*external, *given(queries))
    if queries is not None:
        flags += ["--only", str(queries)]
    elif heads.collections is None:
        flags += training_queries(recipe)
    return SelectionLists(tuple(flags), (*collection_reads(folders), *given(queries)), needs, external)


def _plan_selection_queries(plan: Plan, queries: Path, per_topic: int) -> tuple[Path, str]:
    output = plan.output / "selection.qids"
    call = Call(
        write_selection_queries, (queries, per_topic, output), f"{per_topic} query per topic of {queries} into {output}"
    )
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
        words += (
            [f"--{name.replace('_', '-')}", str(value)]
            if value is not None and not (name == "prune" and value == 0)
            else []
        )
    return words
