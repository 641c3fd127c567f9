"""The phases that make lists and preference pairs: for the training, and held out for the choice of a checkpoint."""

from __future__ import annotations

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
)
from headrank.experiments.plan_readout import plan_labels
from headrank.experiments.recipe import Pairs, Recipe


def plan_pairs(plan: Plan, run: str, recipe: Recipe, kind: str = "pairs") -> tuple[Path, str]:
    """The training lists, or with kind 'held-out' the lists that checkpoints are judged by."""
    data, base = recipe.data, plan.base
    is_held_out = kind == "held-out"
    pairs = _held_out_pairs(recipe) if is_held_out else recipe.pairs
    same = (data, recipe.labels, pairs) == (
        base.data,
        base.labels,
        _held_out_pairs(base) if is_held_out else base.pairs,
    )
    labels = plan_labels(plan, run, recipe)
    phase, folder = plan.shared(kind, run, same)
    chosen = ["--only", str(data.held_out_queries)] if is_held_out else training_queries(recipe)
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


def training_queries(recipe: Recipe) -> list[str]:
    """The flags that leave the held-out queries out."""
    if recipe.data.train_queries is not None:
        return ["--only", str(recipe.data.train_queries)]
    return ["--hold-out", str(recipe.data.held_out_queries)] if recipe.data.held_out_queries is not None else []
