"""The phases of one training: lists, heads, then per round training, export, heads again; and the final model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from headrank.artifacts import remove
from headrank.experiments.phases import Call, Command, Phase
from headrank.experiments.plan import (
    COMPLETE,
    HEADRANK,
    Plan,
    RunPlaces,
    dump,
    given,
    model_reads,
    pairs_reads,
    processes_of,
)
from headrank.experiments.plan_heads import plan_heads, selection_flags, selection_lists
from headrank.experiments.plan_pairs import plan_pairs
from headrank.experiments.plan_readout import plan_readout
from headrank.experiments.recipe import Recipe, Training

PRETRAIN = Path(__file__).resolve().parents[2] / "pretrain_headrank.py"


def plan_training(plan: Plan, run: str, recipe: Recipe) -> RunPlaces:
    """All phases of a run that trains."""
    pairs, pairs_phase = plan_pairs(plan, run, recipe)
    held_out: Path | None = None
    needs = [pairs_phase]
    if recipe.data.held_out_queries is not None:
        held_out, phase = plan_pairs(plan, run, recipe, "held-out")
        needs.append(phase)
    heads: Path | None = None
    heads_phase = ""
    if recipe.heads is not None:
        heads, heads_phase = plan_heads(plan, run, recipe)
        needs += [heads_phase] if heads_phase else []
    places = RunPlaces(run, recipe, heads, None, None, None, {"heads_before": heads_phase} if heads_phase else {})
    base, names = recipe.model, tuple(needs)
    for number in range(1, recipe.rounds + 1):
        places = _plan_round(plan, places, number, base, (pairs, held_out), names)
        if places.trained is None:
            return places
        base, names = str(places.trained), (*names[: len(needs)], *places.phases.values())
    return _plan_final(plan, places, base)


def _suffix(run: str, number: int, rounds: int) -> str:
    return (f"/{run}" if run else "") + (f"/round-{number}" if rounds > 1 else "")


def _plan_round(
    plan: Plan, places: RunPlaces, number: int, base: str, lists: tuple[Path, Path | None], needs: tuple[str, ...]
) -> RunPlaces:
    """Training, export with the heads that were trained, selection on the trained model."""
    recipe, run = places.recipe, places.name
    suffix = _suffix(run, number, recipe.rounds)
    here = plan.output / run / f"round-{number}"
    heads = places.heads_before if number == 1 else places.heads_after or places.heads_before
    train = _plan_train(plan, recipe, f"train{suffix}", here / "train", base, heads, lists, needs)
    places = replace(places, train_folder=here / "train")
    if recipe.export is None:
        return places
    steps = _plan_steps(plan, recipe, run, here, base, train) if number == recipe.rounds else {}
    places = replace(places, steps=steps)
    best = "best" if lists[1] is not None else ""
    is_adapter = recipe.export.adapter_only
    words: tuple[str, ...] = (
        *HEADRANK,
        "export-hf",
        "--overwrite",
        "--checkpoint",
        str(here / "train" / best),
        "--base",
        base,
    )
    words += ("--adapter-only",) if is_adapter else ()
    settings = {"base": base} | ({"adapter_only": True} if is_adapter else {})
    marker = "adapter_config.json" if is_adapter else "config.json"
    made = plan.artifact(f"export{suffix}", here / "hf", settings, (plan.stamp(train),), marker)
    export = plan.add(Phase(f"export{suffix}", Command((*words, "--output", str(here / "hf"))), (made,), (train,)))
    phases = places.phases | {"trained": export}
    places = replace(places, trained=here / "hf", phases=phases)
    if recipe.reselect is None or recipe.heads is None:
        return places
    after, phase = _plan_reselect(plan, run, recipe, f"reselect{suffix}", here, export)
    return replace(places, heads_after=after, phases=phases | {"heads_after": phase})


def _plan_train(
    plan: Plan,
    recipe: Recipe,
    name: str,
    folder: Path,
    base: str,
    heads: Path | None,
    lists: tuple[Path, Path | None],
    needs: tuple[str, ...],
) -> str:
    training = recipe.training
    assert training is not None
    processes = processes_of(plan, recipe)
    pairs, held_out = lists
    words = [sys.executable]
    if processes > 1:  # one process needs no agent above it
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words += [
        str(PRETRAIN),
        *training_flags(training, heads, base),
        "--train-data-path",
        str(pairs),
        "--save",
        str(folder),
    ]
    if held_out is not None:
        words += ["--valid-data-path", str(held_out), "--eval-interval", str(training.eval_interval)]
    if base != recipe.model:  # a later round: the paper freezes the first model
        words += ["--headrank-reference-model", recipe.model]
    if training.shared_reference:
        words += ["--headrank-reference-cache", str(plan.output / "reference_scores.jsonl")]
        first = next((phase.name for phase in plan.phases if phase.name.startswith("train")), None)
        needs = (*needs, first) if first else needs  # it fills the file that the others only read
    settings = {"training": dump(training, without={"processes"}) | {"processes": processes}, "model": base}
    start = model_reads(base) if base == recipe.model else (Path(base),)
    reads = (*pairs_reads(pairs), *pairs_reads(held_out), *given(heads), *start)
    made = plan.artifact(name, folder, settings, reads, COMPLETE)
    command = Command(tuple(words), {"PYTHONWARNINGS": "ignore"}, saves_when_signalled=True, processes=processes)
    external = (recipe.heads.file,) if recipe.heads is not None and recipe.heads.file is not None else ()
    plan.add(Phase(name, command, (made,), tuple(dict.fromkeys(needs)), external))
    if recipe.export is None and not training.keep_checkpoints:
        return plan.add(_discard(plan, name, folder))
    return name


def training_flags(training: Training, heads: Path | None, base: str) -> list[str]:
    """The settings of a training as flags of pretrain_headrank.py."""
    words = ["--headrank-model", base, *(["--headrank-heads", str(heads)] if heads is not None else [])]
    words += ["--tensor-model-parallel-size", str(training.tensor_parallel), "--exit-signal-handler"]
    words += [
        "--micro-batch-size",
        str(training.micro_batch_size),
        "--seed",
        str(training.seed),
        "--lr",
        str(training.lr),
    ]
    words += ["--clip-grad", str(training.clip_grad), "--save-interval", str(training.save_interval)]
    if training.global_batch_size is not None:
        words += ["--global-batch-size", str(training.global_batch_size)]
    if training.iterations is not None:
        words += ["--train-iters", str(training.iterations)]
    if training.stop_after is not None:
        words += ["--headrank-stop-after", str(training.stop_after)]
    if training.keep_steps:
        words += ["--headrank-keep-iters", *map(str, training.keep_steps)]
    words += ["--headrank-epochs", str(training.epochs), "--headrank-epoch-unit", training.epoch_unit]
    words += [
        "--headrank-pairs-per-context",
        str(training.pairs_per_context),
        "--headrank-permutations",
        str(training.permutations),
    ]
    words += ["--headrank-document-layout", training.layout] if training.layout is not None else []
    words += ["--headrank-all-heads"] if training.all_heads else []
    flags = {"log-interval": 1, **training.flags}
    # false is no flag at all: argparse switches have no off position
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
    return words


def _plan_steps(plan: Plan, recipe: Recipe, run: str, here: Path, base: str, train: str) -> dict[int, tuple[Path, str]]:
    """Each kept checkpoint as a model with heads of its own: step -> (folder, the phase that makes it)."""
    assert recipe.training is not None
    made_models = {}
    prefix = f"/{run}" if run else ""
    for step in recipe.training.keep_steps:
        there, name = here / f"step-{step}", f"{prefix}/step-{step}"
        words: tuple[str, ...] = (
            *HEADRANK,
            "export-hf",
            "--overwrite",
            "--checkpoint",
            str(here / "train" / f"iter_{step:07d}"),
        )
        made = plan.artifact(f"export{name}", there / "hf", {"base": base}, (plan.stamp(train),), "config.json")
        command = Command((*words, "--base", base, "--output", str(there / "hf")))
        export = plan.add(Phase(f"export{name}", command, (made,), (train,)))
        if recipe.reselect is None or recipe.heads is None:
            made_models[step] = (there / "hf", export)
            continue
        heads, selected = _plan_reselect(plan, run, recipe, f"reselect{name}", there, export)
        words = (
            *HEADRANK,
            "export-hf",
            "--overwrite",
            "--exported",
            str(there / "hf"),
            "--heads",
            str(heads),
            "--base",
            base,
        )
        final = plan.artifact(f"model{name}", there / "model", {}, (there / "hf", heads), "config.json")
        phase = Phase(f"model{name}", Command((*words, "--output", str(there / "model"))), (final,), (export, selected))
        made_models[step] = (there / "model", plan.add(phase))
    return made_models


def _plan_reselect(plan: Plan, run: str, recipe: Recipe, name: str, here: Path, export: str) -> tuple[Path, str]:
    """The same lists and settings as before training, on the trained model and in its prompt."""
    assert recipe.heads is not None and recipe.reselect is not None
    if recipe.heads.readout is not None:
        trained = here / "hf"
        return plan_readout(
            plan, run, recipe, name, here / "heads.json", str(trained), needs=(export,), prompt_of=trained
        )
    heads = recipe.heads.model_copy(
        update={key: value for key, value in recipe.reselect.model_dump().items() if value is not None}
    )
    lists = selection_lists(plan, run, recipe)
    method = next((method for method in heads.methods if method != "niah"), "entropy")
    words = [
        *HEADRANK,
        "select-heads",
        "--method",
        method,
        "--model",
        str(here / "hf"),
        "--prompt-of",
        str(here / "hf"),
        *lists.flags,
    ]
    words += [*selection_flags(plan, heads), "--output", str(here / "heads.json")]
    settings = {"heads": dump(heads, without={"methods"}), "method": method, "lists": " ".join(lists.flags)}
    made = plan.artifact(name, here / "heads.json", settings, (*lists.reads, here / "hf"))
    needs = tuple(dict.fromkeys([export, *lists.needs]))
    return here / "heads.json", plan.add(
        Phase(name, Command(tuple(words)), (made,), needs, lists.external, prints=True)
    )


def _plan_final(plan: Plan, places: RunPlaces, base: str) -> RunPlaces:
    """OUTPUT/[RUN/]model: the weights of the last round with its last heads; truncated, it is converted from the
    checkpoint again.
    """
    recipe, run = places.recipe, places.name
    assert recipe.export is not None and places.trained is not None and places.train_folder is not None
    output, name = plan.output / run / "model", "model" + (f"/{run}" if run else "")
    # upper layers of a truncated checkpoint come from what the last round started from, not from the first model
    origin = recipe.model if recipe.rounds == 1 else str(plan.output / run / f"round-{recipe.rounds - 1}" / "hf")
    checkpoint = places.train_folder / ("best" if recipe.data.held_out_queries is not None else "")
    source = ["--checkpoint", str(checkpoint), "--truncate"] if recipe.export.truncate else ["--exported", base]
    heads = ["--heads", str(places.heads_after)] if places.heads_after is not None else []
    words: tuple[str, ...] = (
        *HEADRANK,
        "export-hf",
        "--overwrite",
        *source,
        *heads,
        "--base",
        origin,
        "--output",
        str(output),
    )
    reads = tuple(path for path in (places.trained, places.heads_after) if path is not None)
    marker = "adapter_config.json" if recipe.export.adapter_only else "config.json"
    made = plan.artifact(name, output, {"export": dump(recipe.export)}, reads, marker)
    needs = tuple(places.phases[kind] for kind in ("trained", "heads_after") if kind in places.phases)
    phase = plan.add(Phase(name, Command(words), (made,), needs))
    if recipe.training is not None and not recipe.training.keep_checkpoints:
        plan.add(_discard(plan, phase, places.train_folder))
    return replace(places, final=output, phases=places.phases | {"final": phase})


def _discard(plan: Plan, after: str, folder: Path) -> Phase:
    """Remove checkpoints once nothing needs them; the log, the reference scores and the mark of completion stay."""
    name = after.replace("train", "discard", 1).replace("model", "discard", 1)
    call = Call(
        discard_checkpoints, (folder, plan.stamp(name).with_suffix(".done")), f"remove the checkpoints in {folder}"
    )
    made = plan.artifact(name, plan.stamp(name).with_suffix(".done"), {}, (plan.stamp(after),))
    return Phase(name, call, (made,), (after,))


def discard_checkpoints(folder: Path, done: Path) -> None:
    """Remove iter_* and the link to the best of them."""
    for path in [*folder.glob("iter_*"), folder / "best"]:
        remove(path)
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
