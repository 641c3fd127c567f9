"""The paper's fourteen benchmarks: what they are, making them ready, running methods on them.

headrank benchmark list                      all of them, the paper's numbers, which are ready here
headrank benchmark list fiqa                 everything known about one: sources, quirks, all published numbers
headrank benchmark prepare musique --from FILE.json --run ranking.tsv   HippoRAG's or ICR's file
headrank benchmark prepare dl19 --from DIR   from a collection or BEIR folder, checked against the paper; instead of
                                             a folder 'ir_datasets' and 'pyserini' download it, where installed
headrank benchmark run ...                   a matrix of models, methods and benchmarks
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands.options import progress
from headrank.errors import InputError

if TYPE_CHECKING:
    from data_tools.benchmarks import Benchmark
    from data_tools.prepare_benchmark import Check
    from headrank.experiments.matrix_plan import MatrixBenchmark

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Three actions, each with its own flags."""
    from headrank.commands import benchmark_run

    actions = parser.add_subparsers(dest="action", required=True, metavar="list | prepare | run")
    listing = actions.add_parser("list", help="what there is and what is ready")
    listing.add_argument("names", nargs="*", metavar="NAME", help="show everything about these")
    preparing = actions.add_parser("prepare", help="make a benchmark from local files and check it against the paper")
    preparing.add_argument("name", metavar="NAME", help="a name from 'headrank benchmark list'")
    preparing.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help="a collection folder, an unpacked BEIR folder, HippoRAG's or ICR's FILE.json (hotpotqa, 2wiki, "
        "musique), or one of the words "
        "ir_datasets (or ir_datasets:ID for another id of it) and pyserini",
    )
    preparing.add_argument(
        "--run",
        metavar="FILE",
        help="candidates: a TREC run or, for a FILE.json with its FILE_corpus.json, ColBERT's ranking.tsv",
    )
    preparing.add_argument(
        "--colbert",
        nargs="?",
        const="colbert-ir/colbertv2.0",
        metavar="MODEL",
        help="make the candidates of a FILE.json with this ColBERT model (default colbert-ir/colbertv2.0; extra "
        "'colbert')",
    )
    preparing.add_argument(
        "--remove-query",
        action="store_true",
        help="drop candidates that are the query itself (ArguAna as BEIR scores it)",
    )
    preparing.add_argument("--overwrite", action="store_true", help="replace what an earlier 'prepare' made")
    preparing.add_argument(
        "--strict", action="store_true", help="exit with 1 when a first-stage number is not the paper's"
    )
    running = actions.add_parser(
        "run", help="a matrix of models, methods and benchmarks", description=benchmark_run.__doc__
    )
    benchmark_run.add_arguments(running)
    for action in (listing, preparing, running):
        action.add_argument(
            "--home",
            metavar="DIR",
            help="where prepared benchmarks lie (default: $HEADRANK_BENCHMARKS or the user's cache)",
        )


def run(args: argparse.Namespace) -> int:
    """Do the chosen action."""
    if args.action == "run":
        from headrank.commands import benchmark_run

        args.benchmarks = _all_prepared(args.benchmarks, args.home)
        return benchmark_run.run(args, find_benchmark=lambda name: find_prepared(name, args.home))
    return _prepare(args) if args.action == "prepare" else _list(args)


def _all_prepared(names: list[str], home: str | None) -> list[str]:
    """The names as given; 'all' stands for every benchmark that is prepared."""
    from data_tools.benchmarks import BENCHMARKS, benchmark_home, is_ready

    if "all" not in names:
        return names
    folder = benchmark_home(home)
    ready = [name for name, benchmark in BENCHMARKS.items() if is_ready(benchmark, folder)]
    if not ready:
        raise InputError(f"--benchmarks all: none is prepared in {folder}; headrank benchmark prepare NAME --from DIR")
    left_out = [name for name in BENCHMARKS if name not in ready]
    if left_out:
        _log.warning("--benchmarks all: not prepared and left out: %s", ", ".join(left_out))
    return list(dict.fromkeys(other for name in names for other in (ready if name == "all" else [name])))


def find_prepared(name: str, home: str | None = None) -> MatrixBenchmark:
    """A prepared benchmark for the matrix; averages are the paper's, over the queries that have candidates."""
    from data_tools.benchmarks import benchmark_home, find_benchmark, is_ready
    from headrank.experiments.matrix_plan import MatrixBenchmark

    benchmark = find_benchmark(name)
    folder = benchmark_home(home)
    if not is_ready(benchmark, folder):
        raise InputError(
            f"benchmark {benchmark.name!r} is not ready in {folder}; headrank benchmark prepare {benchmark.name} "
            "--from DIR"
        )
    return MatrixBenchmark(
        benchmark.name,
        folder / benchmark.name,
        benchmark.depth,
        benchmark.measures,
        missing="skip",
        retriever=benchmark.retriever,
    )


def _list(args: argparse.Namespace) -> int:
    from data_tools.benchmarks import BENCHMARKS, benchmark_home, find_benchmark
    from headrank.reports.grids import Grid
    from headrank.reports.table_text import to_text

    home = benchmark_home(args.home)
    if args.names:
        print("\n\n".join(_details(find_benchmark(name), home) for name in args.names))
        return 0
    rows = [_row(benchmark, home) for benchmark in BENCHMARKS.values()]
    header = ("name", "candidates", "measure", "queries", "first stage", "0.6B", "1.7B", "4B", "ready")
    print(to_text(Grid("", header, tuple(rows)), numbers=range(3, 8)), end="")
    print(
        "\nfirst stage and HeadRank 0.6B, 1.7B, 4B: the paper's published numbers, of the last measure. ready: in "
        f"{home}"
    )
    return 0


def _row(benchmark: Benchmark, home: Path) -> tuple[str, ...]:
    from data_tools.benchmarks import is_ready
    from headrank.evaluation.published import TABLE_1, TABLE_2

    measure = benchmark.measures[-1]
    numbers = {
        (number.model, number.method): number.value
        for number in benchmark.published()
        if number.measure == measure and number.table in (TABLE_1, TABLE_2)
    }
    values = [numbers["first-stage", benchmark.retriever]]
    values += [numbers[f"Qwen3-{size}", "headrank"] for size in ("0.6B", "1.7B", "4B")]
    ready = "yes" if is_ready(benchmark, home) else "-"
    candidates = f"{benchmark.retriever} top-{benchmark.depth}"
    return (
        benchmark.name,
        candidates,
        "/".join(benchmark.measures),
        str(benchmark.num_queries),
        *(f"{value:.2f}" for value in values),
        ready,
    )


def _details(benchmark: Benchmark, home: Path) -> str:
    from data_tools.benchmarks import is_ready
    from headrank.reports.grids import Grid
    from headrank.reports.table_text import to_text

    facts = {
        "group": benchmark.group,
        "candidates": f"{benchmark.retriever} top-{benchmark.depth}",
        "measures": ", ".join(benchmark.measures),
        "queries": str(benchmark.num_queries),
        "pyserini": f"index {benchmark.index}, topics {benchmark.topics}, qrels {benchmark.qrels}"
        if benchmark.index
        else None,
        "ir_datasets": benchmark.ir_datasets,
        "source": benchmark.source or None,
        "licence": benchmark.licence,
        "ready": str(home / benchmark.name) if is_ready(benchmark, home) else _how_to_prepare(benchmark),
    }
    lines = [f"{benchmark.name}: {benchmark.title}"]
    lines += [f"  {name:<12} {value}" for name, value in facts.items() if value is not None]
    lines += [f"  {'mind':<12} {quirk}" for quirk in benchmark.quirks]
    rows = [
        (number.table.partition(":")[0], number.model, number.method, number.measure, f"{number.value:.2f}")
        for number in benchmark.published()
    ]
    table = to_text(Grid("", ("paper's", "model", "method", "measure", "value"), tuple(rows)), numbers=(4,))
    return "\n".join([*lines, *(f"  {line}" for line in table.splitlines())])


def _how_to_prepare(benchmark: Benchmark) -> str:
    known = {
        "FILE.json": benchmark.group == "multi-hop",
        "ir_datasets": benchmark.ir_datasets,
        "pyserini": benchmark.index,
    }
    sources = ["DIR", *(name for name, is_there in known.items() if is_there)]
    return f"no; headrank benchmark prepare {benchmark.name} --from {' | '.join(sources)}"


def _prepare(args: argparse.Namespace) -> int:
    import dataclasses

    from data_tools.benchmarks import benchmark_home, find_benchmark
    from data_tools.collection_files import require_free
    from data_tools.prepare_benchmark import check_first_stage, read_material, remove_query_documents, write_benchmark

    benchmark = find_benchmark(args.name)
    folder = benchmark_home(args.home) / benchmark.name
    if folder.exists() and not args.overwrite:
        raise InputError(f"{folder}: already exists; --overwrite replaces it")
    require_free(folder, args.overwrite)
    material = read_material(
        benchmark,
        args.source,
        lambda documents: progress(documents, description="indexing", unit="document"),
        run=args.run,
        colbert=args.colbert,
    )
    run_without, num_own = remove_query_documents(material.run)
    if args.remove_query:
        material = dataclasses.replace(
            material, run=run_without, origin=f"{material.origin}, without the query's own document"
        )
    checks = check_first_stage(benchmark, material)
    facts = write_benchmark(benchmark, material, checks, folder, overwrite=args.overwrite)
    print(
        f"{folder}: {facts['queries']} queries (the paper's set has {benchmark.num_queries}), candidates from "
        f"{material.origin}"
    )
    if facts["queries_without_candidates"]:
        print(f"{facts['queries_without_candidates']} queries have no candidates")
    if facts["shortest_list"] < benchmark.depth:
        print(f"the shortest list has {facts['shortest_list']} candidates, the paper's lists have {benchmark.depth}")
    if num_own:
        print(
            f"{num_own} candidates {'were' if args.remove_query else 'are'} the query's own "
            f"document{' and left out' * args.remove_query}"
        )
    for check in checks:
        print(_verdict(benchmark, check))
    return 1 if args.strict and not all(check.is_equal for check in checks) else 0


def _verdict(benchmark: Benchmark, check: Check) -> str:
    ours = f"{check.measure} of the candidates: {check.over_found:.2f}"
    if abs(check.over_all - check.over_found) >= 0.005:
        ours += f" over the queries with results ({check.over_all:.2f} over all)"
    if check.published is None:
        return f"{ours}; the paper prints none"
    relation = (
        "equal"
        if check.is_equal
        else f"{check.over_found - check.published:+.2f}, these are not the paper's candidates"
    )
    return f"{ours}; the paper's {benchmark.retriever}: {check.published:.2f} ({relation})"
