"""`headrank benchmark run`: a resumable matrix of models, methods and benchmarks, one directory per cell.

Each cell, or all cells that share a forward, has a process of its own, so that its peak memory is its own and a crash
costs no other cell. A cell whose ranking and measures are still valid is skipped; one cut short goes on at the query
where it stopped. The cells are split over processes by --shard I/N, by torchrun or by a SLURM array. Other names,
several seeds of a model, variants of a method or settings of one benchmark: write a study file, see 'headrank
experiment run' and docs/experiments.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrank.artifacts import describe_change, fingerprint, remove
from headrank.commands import options
from headrank.errors import InputError
from headrank.evaluation.measures import measure_name
from headrank.experiments.cell_jobs import CellGroup, CellSettings
from headrank.experiments.cells import METRICS, Cell, read_cell
from headrank.experiments.display import make_display
from headrank.experiments.matrix_plan import (
    ORDERS,
    MatrixBenchmark,
    MatrixModel,
    model_name,
    parse_shard,
    plan_cells,
    share_forwards,
)
from headrank.experiments.phases import STAMPS, Phase
from headrank.experiments.runner import Runner
from headrank.method.prompt import LAYOUTS, QUERY_ROWS
from headrank.method.published_prompts import PUBLISHED_PROMPTS
from headrank.methods import METHODS, method_name

_log = logging.getLogger(__name__)
Resolver = Callable[[str], MatrixBenchmark]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank benchmark run`."""
    what = parser.add_argument_group("matrix")
    what.add_argument(
        "--models",
        nargs="+",
        default=["embedded"],
        metavar="MODEL",
        help="directories or hub names; the last part of the path is the name in tables (default: embedded)",
    )
    what.add_argument("--name", help="another name of the model in tables, such as the paper's: Qwen3-0.6B")
    what.add_argument(
        "--methods",
        nargs="+",
        default=["bm25", "icr"],
        metavar="METHOD",
        help=f"{', '.join(METHODS)} (default: bm25 icr)",
    )
    what.add_argument(
        "--benchmarks",
        nargs="+",
        required=True,
        metavar="NAME",
        help="names of 'headrank benchmark list' ('all': those that are prepared), or collection folders",
    )
    what.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="FILE",
        help="heads.json files, or 'full' or 'fast' of the embedded model; each is for the method that it was "
        "selected by",
    )
    what.add_argument(
        "--depths",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="candidates reranked (default: the benchmark's, else 40)",
    )
    what.add_argument(
        "--orders",
        nargs="+",
        choices=ORDERS,
        default=["retriever"],
        help="document orders in the prompt (default retriever)",
    )
    what.add_argument(
        "--measures",
        nargs="+",
        metavar="M",
        help="measures, the leading one first (default: the benchmark's, else nDCG@10)",
    )
    _add_running_arguments(parser.add_argument_group("running"))


def _add_running_arguments(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--output", required=True, metavar="DIR", help="directory of the cells")
    how.add_argument("--only", metavar="FILE", help="only the query ids in this file")
    how.add_argument("--jobs", type=options.positive_int, default=1, metavar="N", help="cells at a time (default 1)")
    how.add_argument("--shuffle-seed", type=options.seed, default=0, help="seed of the shuffled order (default 0)")
    how.add_argument(
        "--shard", metavar="I/N", help="do every N-th cell from the I-th (default: torchrun's or SLURM's own numbers)"
    )
    how.add_argument(
        "--share-forward",
        action="store_true",
        help="read all attention methods of a model off one forward: the same runs, much sooner, but no seconds of "
        "each method",
    )
    how.add_argument(
        "--restart", action="store_true", help="do finished cells again, and those made with other settings"
    )
    how.add_argument("--dry-run", action="store_true", help="list the cells and what is done, then stop")
    how.add_argument("--device", help="cpu, cuda, cuda:1")
    how.add_argument(
        "--batch-size", type=options.positive_int, metavar="B", help="queries per forward (default 1; late readouts 32)"
    )
    how.add_argument("--dtype", choices=options.DTYPES, help="type of the weights (default: auto for late heads)")
    how.add_argument("--query-rows", choices=QUERY_ROWS, help="rows of I_q (default: those of the heads' prompt)")
    how.add_argument(
        "--prompt",
        choices=list(PUBLISHED_PROMPTS),
        help="the prompt of a published method; 'icr' takes ICR's instruction for questions on the benchmarks where "
        "ICR does",
    )
    how.add_argument(
        "--instruction", type=options.escaped, metavar="TEXT", help=r"the late instruction; \n is a new line"
    )
    how.add_argument(
        "--document-layout", choices=LAYOUTS, help="sequential or parallel layout (default: that of the heads' prompt)"
    )
    how.add_argument(
        "--max-words", type=options.positive_int, metavar="N", help="words kept of each document (default 300)"
    )
    how.add_argument(
        "--store", metavar="DIR", help="a passage store of 'headrank index': headrank cells read the passages it holds"
    )
    how.add_argument("--api-base", metavar="URL", help="rankgpt through an OpenAI-compatible endpoint")


def run(args: argparse.Namespace, find_benchmark: Resolver | None = None) -> int:
    """Do this process's cells; exit code 1 when any of them failed. ``find_benchmark`` resolves registered names."""
    cells = plan_cells(
        _models(args.models, args.name),
        args.methods,
        [_benchmark(text, args, find_benchmark) for text in args.benchmarks],
        _heads(args.heads, args.methods),
        depths=args.depths,
        orders=args.orders,
    )
    index, count = parse_shard(args.shard, os.environ)
    groups = share_forwards(cells) if args.share_forward else [[cell] for cell in cells]
    names = [item.name for item in dataclasses.fields(CellSettings) if item.name != "command"]
    settings = CellSettings(**{name: getattr(args, name) for name in names}, command=tuple(sys.argv[1:]))
    output = Path(args.output)
    mine = [CellGroup(tuple(group), settings, output) for group in groups[index::count]]
    phases = [group.phase() for group in mine]
    if args.restart and not args.dry_run:
        _forget(mine)
    elif not args.restart:
        _refuse_other_settings(mine)
    done = [phase for phase in phases if phase.why_stale() is None]
    _log.info(
        "%d cells, %d of them here; %d of %d phases already done", len(cells), _count(mine), len(done), len(phases)
    )
    if args.dry_run:
        for phase in phases:
            _log.info("%s: %s", phase.name, phase.why_stale() or "done")
        return 0
    # the runner's code 2 is a cell's bad input; for the matrix that is one failed cell among others
    code = Runner(phases, output, make_display(), jobs=args.jobs, lock=_lock(output, phases)).run(phases)
    folders = [output / cell.folder for group in mine for cell in group.cells]
    for line in summary([read_cell(folder) for folder in folders if (folder / METRICS).is_file()]):
        print(line)
    return min(code, 1) if code != 3 else code


def _count(groups: Sequence[CellGroup]) -> int:
    return sum(len(group.cells) for group in groups)


def _lock(output: Path, phases: Sequence[Phase]) -> Path:
    """Tasks of a job array share an output and have other cells; the same cells twice at a time are refused."""
    return output / STAMPS / f"cells-{fingerprint([phase.name for phase in phases])}.lock"


def _forget(groups: Sequence[CellGroup]) -> None:
    """--restart: nothing that is there counts."""
    for group in groups:
        for cell in group.cells:
            for artifact in (group.ranking(cell), group.measurement(cell)):
                remove(artifact.path)
                remove(artifact.stamp_path)
            for partial in (group.output / cell.folder).glob("*.partial-*"):
                remove(partial)


def _refuse_other_settings(groups: Sequence[CellGroup]) -> None:
    """A cell made with other settings may have cost hours; it is done again only when somebody says so."""
    for group in groups:
        for cell in group.cells:
            ranking = group.ranking(cell)
            stamp = ranking.stamp
            reason = describe_change(stamp.inputs, ranking.inputs()) if stamp is not None else None
            if stamp is None and ranking.path.exists():
                reason = "it has no stamp of this version"
            if reason is not None:
                raise InputError(
                    f"{group.output / cell.folder}: was made with other settings ({reason}); use another --output, "
                    "or --restart "
                    "to do it again"
                )


def _benchmark(text: str, args: argparse.Namespace, find_benchmark: Resolver | None) -> MatrixBenchmark:
    """A folder, else a registered name; --measures replaces the benchmark's own."""
    measures = tuple(measure_name(measure) for measure in args.measures) if args.measures else None
    path = Path(text)
    if path.is_dir():
        return MatrixBenchmark(path.resolve().name, path, 40, measures or ("nDCG@10",))
    if find_benchmark is None or len(path.parts) > 1:
        raise InputError(
            f"--benchmarks {text}: no such collection folder; check the path, or give a name of 'headrank benchmark "
            "list'"
        )
    found = find_benchmark(text)
    chosen = measures or tuple(map(measure_name, found.measures))
    return dataclasses.replace(found, measures=chosen)


def _models(paths: Sequence[str], name: str | None) -> list[MatrixModel]:
    if name is not None and len(paths) > 1:
        raise InputError(
            f"--name {name}: there are {len(paths)} models; name them in a study file, or run them one after the other"
        )
    return [MatrixModel(name or model_name(path), path) for path in paths]


def _heads(given: Sequence[str], methods: Sequence[str]) -> dict[str, str]:
    """Method -> heads.json, by what the file says it was selected by; other selections than the baselines' are
    HeadRank's.
    """
    from headrank.method.heads import HeadSet  # imports torch
    from headrank.reranking import shipped_readouts

    heads: dict[str, str] = {}
    for path in given:
        found = HeadSet.load(shipped_readouts.shipped_path(path) if path in shipped_readouts.NAMES else path)
        selection = found.method.removesuffix("-ndcg")
        method = next((known.name for known in METHODS.values() if known.selection == selection), "headrank")
        if method not in methods:
            raise InputError(
                f"--heads {path}: these heads are for {method}, which is not among --methods {' '.join(methods)}; "
                "add it"
            )
        if method in heads:
            raise InputError(f"--heads {path}: {heads[method]} is for {method} too; a study file can have both as rows")
        heads[method] = path
    return heads


def summary(cells: Sequence[Cell]) -> list[str]:
    """One line per finished cell."""
    lines = []
    for cell in cells:
        measures = "  ".join(f"{name} {100 * value:.2f}" for name, value in cell.metrics["measures"].items())
        seconds = cell.metrics.get("seconds_per_query")
        depth, order = cell.condition
        label = f"{cell.benchmark:<14} top{depth:<4} {order:<10} {cell.model or '-':<24} {method_name(cell.method):<22}"
        lines.append(label + f" {measures}" + (f"  {seconds:.2f} s/query" if seconds else ""))
    return lines
