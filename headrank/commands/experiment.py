"""Studies: everything from the data to the report, described by one file of configs/ and done in phases.

headrank experiment run configs/demo.yaml                     do what is not done; started again it goes on from there
headrank experiment run configs/study.yaml --only heads train --jobs 2
headrank experiment run configs/demo.yaml --set training.lr=3e-5 output=runs/other --dry-run
headrank experiment show configs/demo.yaml                    what is done, what is stale and why, what is next, times
headrank experiment show                                      the studies there are

Ctrl-C lets trainings save a checkpoint; a second one ends them without. Every phase has its log in OUTPUT/logs. A phase
asks only for the files that it reads itself. docs/experiments.md explains the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands import options
from headrank.errors import InputError

if TYPE_CHECKING:
    from headrank.experiments.phases import Phase
    from headrank.experiments.plan_study import StudyPlan

STUDIES = Path("configs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two actions on a study file."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="run | show")
    running = actions.add_parser("run", help="do the phases of a study")
    running.add_argument("study", metavar="FILE", help="the study, such as configs/demo.yaml")
    running.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="PHASE",
        help="only these phases and those below: heads train cells/dl19",
    )
    running.add_argument(
        "--jobs", type=options.positive_int, default=1, metavar="N", help="phases at a time (default 1)"
    )
    running.add_argument("--dry-run", action="store_true", help="print the commands of the phases, write nothing")
    showing = actions.add_parser("show", help="what is done, what is stale and why, what comes next")
    showing.add_argument(
        "study", nargs="?", metavar="FILE", help=f"the study; without it the studies in {STUDIES}/ are listed"
    )
    for action in (running, showing):
        action.add_argument(
            "--set",
            nargs="+",
            action="extend",
            default=[],
            dest="changes",
            metavar="KEY=VALUE",
            help="another value for a setting of the file: training.lr=3e-5 benchmarks.dl19.depths=[20,40]",
        )
        action.add_argument(
            "--output", metavar="DIR", help="another folder for everything that is made (the file's 'output')"
        )


def run(args: argparse.Namespace) -> int:
    """Do the chosen action; 0 done, 1 a phase failed, 2 bad input, 3 stopped and saved."""
    if args.study is None:
        return _list_studies()
    from headrank.experiments.plan_study import plan_study
    from headrank.experiments.study_file import read_study

    planned = plan_study(read_study(args.study, args.changes, args.output))
    return _show(planned) if args.action == "show" else _run(planned, args)


def _list_studies() -> int:
    from headrank.experiments.study_file import read_about

    files = sorted(STUDIES.glob("*.yaml"))
    if not files:
        raise InputError(f"no studies in {STUDIES.resolve()}; name a file, or call this in a checkout of the project")
    width = max(len(str(file)) for file in files)
    for file in files:
        print(f"{file!s:<{width}}  {read_about(file)}")
    return 0


def _run(planned: StudyPlan, args: argparse.Namespace) -> int:
    from headrank.experiments.display import make_display
    from headrank.experiments.phases import select_phases
    from headrank.experiments.plan import remember_choices
    from headrank.experiments.runner import Runner

    chosen = select_phases(planned.phases, args.only)
    if args.dry_run:
        _print_commands(chosen)
        return 0
    _check_tensor_parallel(planned)
    # all phases and not the chosen ones: the runner checks that what was left out is there
    runner = Runner(planned.phases, planned.plan.output, make_display(), jobs=args.jobs)
    code = runner.run(chosen, first=lambda: remember_choices(planned.plan))
    if code == 0:
        _print_results(planned)
    elif code == 3:
        print("stopped; the same command goes on from here")
    return code


def _print_commands(phases: Sequence[Phase]) -> None:
    """A line per phase: '[name] command', or '[name] # words' for what is done by a Python call."""
    from headrank.experiments.phases import Command

    for phase in phases:
        print(f"[{phase.name}] {'' if isinstance(phase.action, Command) else '# '}{phase.action}")


def _check_tensor_parallel(planned: StudyPlan) -> None:
    """A size that does not divide the model is said now, not after the heads are selected; a model elsewhere is
    checked by its training.
    """
    recipes = planned.plan.loaded.recipes.values()
    wanted = {(recipe.model, recipe.training.tensor_parallel) for recipe in recipes if recipe.training is not None}
    for model, size in sorted(wanted):
        if size > 1 and (model == "embedded" or Path(model).is_dir()):
            from headrank.reranking.model_sources import resolve_model
            from megatron_patches.shape import ModelShape, check_tensor_parallel_size

            try:
                check_tensor_parallel_size(ModelShape.from_hf(resolve_model(model)), size)
            except InputError as error:
                raise InputError(f"{planned.plan.loaded.path}: training.tensor_parallel: {error}") from None


def _print_results(planned: StudyPlan) -> None:
    """The tables of all cells that are there, and what to open."""
    from rich.console import Console

    from headrank.experiments.results import result_grids
    from headrank.reports.table_text import to_terminal

    # on a terminal as wide as it is; elsewhere wide enough for a name and four numbers
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 110)
    for grid in result_grids(planned):
        console.print()
        console.print(to_terminal(grid))
    pages = [(label, path) for label, path in planned.pages if path.exists()]
    if pages:
        print()
    width = max((len(label) for label, _ in pages), default=0)
    for label, path in pages:
        print(f"  {label:<{width}}  {path}")


def _show(planned: StudyPlan) -> int:
    from rich.console import Console

    from headrank.experiments.overview import overview

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "150"))
    console = Console(file=sys.stdout, width=width)
    for block in overview(planned):
        console.print(block)
    return 0
