"""Tables, figures and pages from results on disk.

  headrank report --run DIR             did it get better, where, at what cost, which heads: report.html,
                                        report.md, report.json
  headrank report --matrix DIR          the paper's tables (Markdown, LaTeX, CSV) and figures, ours beside the paper's
  headrank report --training DIR        held-out measures of all training runs below DIR, before and after: a tuning,
                                        several seeds; with --output also their learning curves
  headrank report --heads before.json after.json   head table, the paper's heads beside it, depth bands, head maps

DIR holds cells: directories with metrics.json, as 'headrank benchmark run' and 'headrank evaluate --write-metrics'
leave them, or an archive of them (cells.jsonl.gz, as in results/). --matrix puts every benchmark at its own depth (40
for BM25 lists, 20 for multi-hop) into one set of tables, and adds a set for each depth that is not complete in it.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands import options
from headrank.errors import InputError

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank report`."""
    what = parser.add_argument_group("what to report")
    what.add_argument("--run", metavar="DIR", help="one experiment: the cells below this directory on one page")
    what.add_argument(
        "--matrix",
        metavar="DIR",
        nargs="+",
        help="all cells below these directories (one a model size, say) as the paper's tables and figures",
    )
    what.add_argument(
        "--training",
        metavar="DIR",
        help="compare the training runs below this directory; --output also draws their curves",
    )
    what.add_argument(
        "--heads",
        nargs="+",
        metavar="FILE",
        help="heads.json files ([NAME=]FILE, two are 'before' and 'after'); alone or with --run",
    )
    which = parser.add_argument_group("which results (--run and --matrix)")
    which.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="only these, for example icr 'headrank*'; first-stage rows always stay",
    )
    which.add_argument(
        "--benchmarks", nargs="+", default=[], metavar="NAME", help="only these, for tables, figures and their averages"
    )
    parser.add_argument(
        "--pool",
        nargs="?",
        const="",
        metavar="METHOD",
        help="with --matrix: also test over the queries of all benchmarks together (folds of a cross-validation), "
        "every row against this "
        "method, such as headrank+full",
    )
    parser.add_argument(
        "--paper-model",
        choices=["Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"],
        help="with --heads: show the paper's heads of this model beside yours (default: read from the model's name)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="where to write (default: DIR/report, or the folder of the last heads.json)"
    )
    parser.add_argument(
        "--measure", metavar="M", help="with --run: measure to judge by (default: the first of each cell)"
    )
    parser.add_argument(
        "--challenger",
        metavar="ROW",
        help="with --run: row that the page is about, by method or label (default: headrank)",
    )
    parser.add_argument("--collection", metavar="DIR", help="with --run: show the text of the queries that moved most")
    parser.add_argument("--no-published", action="store_true", help="leave the paper's numbers out of the tables")
    parser.add_argument("--title", help="title of the page")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of bootstrap and tests (default 0)")


def run(args: argparse.Namespace) -> int:
    """Write the report and print the paths of its pages."""
    if bool(args.run) + bool(args.matrix) + bool(args.training) > 1 or not (
        args.run or args.matrix or args.training or args.heads
    ):
        raise InputError("give one of --run DIR, --matrix DIR, --training DIR or --heads FILE ...")
    if not (args.run or args.matrix) and (args.methods or args.benchmarks):
        raise InputError("--methods and --benchmarks go with --run DIR or --matrix DIR; leave them out")
    if args.pool is not None and not args.matrix:
        raise InputError("--pool goes with --matrix DIR; leave it out")
    if not args.run:
        for flag in ("measure", "challenger", "collection"):
            if getattr(args, flag) is not None:
                raise InputError(f"--{flag} {getattr(args, flag)} goes with --run DIR only; leave it out")
    if args.training:
        return _report_training(args)
    written = _report_run(args) if args.run else _report_matrix(args) if args.matrix else _report_heads(args)
    for path in written:
        print(path)
    return 0


def _report_training(args: argparse.Namespace) -> int:
    from headrank.files import atomic_write
    from headrank.reports.training_curves import METRICS_LOG, read_training_log
    from headrank.reports.training_table import training_rows, training_table

    rows = training_rows(Path(args.training))
    text = training_table(rows)
    print(text, end="")
    if args.output:
        from headrank.reports.figures import draw_learning_curves

        with atomic_write(Path(args.output) / "training.md") as stream:
            stream.write(text)
        for row in rows:
            log = read_training_log(row.folder / METRICS_LOG)
            draw_learning_curves(log, Path(args.output) / "figures" / "training" / row.name)
    return 0


def _report_run(args: argparse.Namespace) -> list[Path]:
    from headrank.evaluation.comparison import Settings
    from headrank.evaluation.measures import measure_name
    from headrank.experiments.cells import find_cells
    from headrank.files import plain_or_gzipped
    from headrank.formats import read_queries
    from headrank.reports.conditions import select_cells
    from headrank.reports.run_report import RunReport, write_run_report

    folder = Path(args.run)
    report = RunReport(
        cells=select_cells(find_cells(folder), args.methods, args.benchmarks),
        output=Path(args.output or folder / "report"),
        measure=measure_name(args.measure) if args.measure else None,
        challenger=args.challenger,
        head_sets=_load_heads(args.heads) if args.heads else _heads_beside(folder),
        queries=read_queries(plain_or_gzipped(args.collection, "queries.tsv")) if args.collection else {},
        settings=Settings(seed=args.seed),
    )
    return write_run_report(folder, report, args.title)


def _report_matrix(args: argparse.Namespace) -> list[Path]:
    from data_tools.benchmarks import BENCHMARKS
    from headrank.experiments.cells import find_cells
    from headrank.reports.conditions import select_cells
    from headrank.reports.matrix_report import write_matrix_report
    from headrank.reports.paper_specs import paper_specs

    folders = [Path(folder) for folder in args.matrix]
    output = Path(args.output or (folders[0].parent if folders[0].is_file() else folders[0]) / "report")
    cells = [cell for folder in folders for cell in find_cells(folder)]
    written = write_matrix_report(
        select_cells(cells, args.methods, args.benchmarks),
        output,
        paper_specs(BENCHMARKS),
        own_depths={name: benchmark.depth for name, benchmark in BENCHMARKS.items()},
        with_published=not args.no_published,
        pool=args.pool,
    )
    _log.info("%d files below %s", len(written), output)
    # the pages; the figures and tables are listed on them
    return written[-2:]


def _report_heads(args: argparse.Namespace) -> list[Path]:
    from headrank.reports.head_depth import compare_heads
    from headrank.reports.head_report import head_blocks, write_head_table
    from headrank.reports.page import Page

    sets = _load_heads(args.heads)
    output = Path(args.output or Path(args.heads[-1].rpartition("=")[2]).parent / "report")
    change = compare_heads(*sets.values()) if len(sets) == 2 else None  # refuses before anything is drawn
    page = Page(args.title or "Core heads: " + ", ".join(sets))
    page.add("Core heads", head_blocks(sets, output / "figures", args.paper_model))
    written = []
    if change is not None:
        before, after = sets
        write_head_table(change, before, after, output / "heads.tex")
        written.append(output / "heads.tex")
    return [*written, *page.write(output, "heads")]


def _load_heads(paths: list[str]) -> dict[str, HeadSet]:
    from headrank.method.heads import HeadSet
    from headrank.reports.head_report import label_paths

    return {label: HeadSet.load(path) for label, path in label_paths(paths).items()}


def _heads_beside(folder: Path) -> dict[str, HeadSet]:
    """The head sets of a run's folder: heads.before.json, heads.after.json and the like, or, as a study leaves them,
    heads.json before training and round-N/heads.json after each round.
    """
    from headrank.method.heads import HeadSet

    # by length first: round-10 comes after round-9
    rounds = sorted(folder.glob("round-*/heads.json"), key=lambda path: (len(path.parent.name), path.parent.name))
    if rounds and (folder / "heads.json").is_file():
        names = ["before", *(f"after {path.parent.name}" for path in rounds[:-1]), "after"]
        return {name: HeadSet.load(path) for name, path in zip(names, [folder / "heads.json", *rounds], strict=True)}

    def place(path: Path) -> tuple[int, str]:
        return ("before" not in path.name) + ("after" in path.name), path.name

    found = sorted(folder.glob("heads*.json"), key=place)
    return {
        path.name.removesuffix(".json").removeprefix("heads").strip("._-") or "heads": HeadSet.load(path)
        for path in found
    }
