"""The phases of a study's ``selections``: sets of heads besides those that are trained, such as a baseline's as its
paper selects it.
"""

from __future__ import annotations

from pathlib import Path

from headrank.experiments.phases import Command, Phase
from headrank.experiments.plan import (
    HEADRANK,
    Plan,
    collection_files,
    collection_flags,
    collection_reads,
    dump,
    flags_of,
    model_reads,
)
from headrank.experiments.plan_heads import selection_flags, selection_lists
from headrank.experiments.recipe import Heads, Recipe, Selection

_OF_HEADS = (
    "top_k",
    "temperature",
    "entropy_weight",
    "contrast",
    "per_query",
    "gold_grade",
    "collections",
    "queries",
    "depth",
)


def plan_selection(plan: Plan, run: str, recipe: Recipe, name: str) -> tuple[Path, str, tuple[Path, ...]]:
    """(heads.json, the phase that makes it, ()): the setting's own, in OUTPUT where every run has the same."""
    chosen, base = recipe.selections[name], plan.base
    same = (chosen, recipe.heads, recipe.data, recipe.prompt) == (
        base.selections.get(name),
        base.heads,
        base.data,
        base.prompt,
    )
    prefix, folder = plan.shared("selection", run, same)
    phase, output = f"{prefix}/{name}", folder / f"heads.{name}.json"
    prompt = ["--prompt", chosen.prompt] if chosen.prompt is not None else flags_of(recipe.prompt)
    words = [*HEADRANK, "select-heads", "--method", chosen.method, "--model", recipe.model, *prompt]
    settings = {
        "model": recipe.model,
        "selection": dump(chosen),
        "prompt": dump(recipe.prompt),
        "heads": dump(recipe.heads),
    }
    if chosen.method == "niah":
        flags, reads, needs, external = _needles(plan, recipe, chosen)
    elif chosen.paragraphs is not None:
        flags = tuple(word for path in chosen.paragraphs for word in ("--paragraphs", str(path)))
        reads, needs, external = tuple(chosen.paragraphs), (), tuple(chosen.paragraphs)
        flags += tuple(selection_flags(plan, _heads(recipe, chosen).model_copy(update={"collections": "pairs"})))
    else:
        heads = _heads(recipe, chosen)
        lists = selection_lists(plan, run, recipe.model_copy(update={"heads": heads}))
        flags, reads, needs, external = (
            (*lists.flags, *selection_flags(plan, heads)),
            lists.reads,
            lists.needs,
            lists.external,
        )
    made = plan.artifact(phase, output, settings, (*reads, *model_reads(recipe.model)))
    action = Command((*words, *flags, "--output", str(output)))
    return output, plan.add(Phase(phase, action, (made,), needs, external, prints=True)), ()


def _heads(recipe: Recipe, chosen: Selection) -> Heads:
    """The settings of ``heads`` with those given here."""
    changes = {name: value for name in _OF_HEADS if (value := getattr(chosen, name)) is not None}
    # how many heads a method keeps is its own affair
    return (recipe.heads or Heads()).model_copy(update={"methods": [chosen.method], "top_k": None, **changes})


def _needles(
    plan: Plan, recipe: Recipe, chosen: Selection
) -> tuple[tuple[str, ...], tuple[Path, ...], tuple[str, ...], tuple[Path, ...]]:
    """NIAH's questions, in the passages of the first collection."""
    folders = (chosen.collections or recipe.data.collections)[:1]
    heads = recipe.heads or Heads()
    flags = [*collection_flags(folders), "--needles", str(chosen.needles or heads.needles)]
    flags += ["--haystack-words", *map(str, chosen.haystack_words)] if chosen.haystack_words is not None else []
    flags += ["--top-k", str(chosen.top_k)] if chosen.top_k is not None else []
    needs = tuple(phase.name for phase in plan.phases if phase.name.startswith("retrieve/"))
    external = () if needs else collection_files(folders)[-1:]
    return tuple(flags), collection_reads(folders)[-2:], needs, external
