"""`headrank benchmark run`: a resumable matrix of models, methods and benchmarks, one directory a cell.

Each cell is reranked by its own `headrank rerank` process, so its peak memory is its own and a crash costs one cell; then it is
measured here. A cell with metrics.json is done; a cell cut short goes on at the query where it stopped. The cells are split
over processes by --shard I/N, by torchrun or by a SLURM array.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.measures import evaluate_run, measure_name
from headrank.experiments.cells import METRICS, RUN, SCORES, Cell, read_cell
from headrank.experiments.matrix_plan import ORDERS, MatrixBenchmark, MatrixCell, parse_model, parse_shard, plan_cells, share_forwards
from headrank.experiments.metrics_file import META, read_facts, write_metrics
from headrank.files import file_sha256
from headrank.formats import Collection, read_json, read_qrels, read_run, write_json, write_jsonl, write_run
from headrank.method.prompt import LAYOUTS, QUERY_ROWS
from headrank.methods import METHODS, method_name

_log = logging.getLogger(__name__)
SETTINGS = "cell.json"
Resolver = Callable[[str], MatrixBenchmark]
Execute = Callable[[Sequence[str]], int]
# What makes a process a member of a group. LOCAL_RANK stays: it says which GPU the process has (headrank/placement.py).
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank benchmark run`."""
    what = parser.add_argument_group("matrix")
    what.add_argument(
        "--models", nargs="+", default=["embedded"], metavar="MODEL", help="MODEL, NAME=MODEL or NAME@SEED=MODEL (default: embedded)"
    )
    what.add_argument(
        "--methods", nargs="+", default=["bm25", "icr"], metavar="METHOD", help=f"{', '.join(METHODS)}; METHOD+VARIANT labels a variant"
    )
    what.add_argument(
        "--benchmarks",
        nargs="+",
        required=True,
        metavar="NAME",
        help="registered names ('all': those that are prepared), or NAME=DIR for a collection folder",
    )
    what.add_argument("--heads", nargs="+", default=[], metavar="[MODEL/]METHOD=FILE", help="heads.json of the methods that select heads")
    what.add_argument(
        "--depths", nargs="+", type=int, default=[], metavar="N", help="candidates reranked (default: the benchmark's, else 40)"
    )
    what.add_argument(
        "--orders", nargs="+", choices=ORDERS, default=["retriever"], help="document orders in the prompt (default retriever)"
    )
    what.add_argument("--measures", nargs="+", metavar="M", help="measures, the leading one first (default: the benchmark's, else nDCG@10)")
    how = parser.add_argument_group("running")
    how.add_argument("--output", required=True, metavar="DIR", help="directory of the cells")
    how.add_argument("--only", metavar="FILE", help="only the query ids in this file")
    how.add_argument("--shuffle-seed", type=int, default=0, help="seed of the shuffled order (default 0)")
    how.add_argument("--shard", metavar="I/N", help="do every N-th cell from the I-th (default: torchrun's or SLURM's own numbers)")
    how.add_argument(
        "--share-forward",
        action="store_true",
        help="read all attention methods of a model off one forward: the same runs, much sooner, but no seconds of each method",
    )
    how.add_argument("--restart", action="store_true", help="do finished cells again")
    how.add_argument("--dry-run", action="store_true", help="list the cells and what is done, then stop")
    for flag, meaning in (
        ("--device", "cpu, cuda, cuda:1"),
        ("--batch-size", "queries a forward"),
    ):
        how.add_argument(flag, help=f"passed to 'headrank rerank': {meaning}")
    how.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="passed to 'headrank rerank'")
    how.add_argument(
        "--query-rows", choices=QUERY_ROWS, help="passed to 'headrank rerank': rows of I_q (default: those of the heads' prompt)"
    )
    how.add_argument("--document-layout", choices=LAYOUTS, help="passed to 'headrank rerank': documents one after another or side by side")
    how.add_argument("--max-words", help="passed to 'headrank rerank'")
    how.add_argument("--api-base", metavar="URL", help="rankgpt through an OpenAI-compatible endpoint")


def run(args: argparse.Namespace, find_benchmark: Resolver | None = None, execute: Execute | None = None) -> int:
    """Do this process's cells; exit code 1 when any of them failed. ``find_benchmark`` resolves registered names."""
    cells = plan_cells(
        [parse_model(text) for text in args.models],
        args.methods,
        [_benchmark(text, args, find_benchmark) for text in args.benchmarks],
        _heads(args.heads),
        depths=args.depths,
        orders=args.orders,
    )
    index, count = parse_shard(args.shard, os.environ)
    groups = share_forwards(cells) if args.share_forward else [[cell] for cell in cells]
    mine = [cell for group in groups[index::count] for cell in group]
    output = Path(args.output)
    states = {cell.folder: _state(output / cell.folder, cell.settings(_shared(args)), args.restart) for cell in mine}
    _log.info("%d cells, %d of them here, %d already done", len(cells), len(mine), sum(state == "done" for state in states.values()))
    failed = []
    for group in groups[index::count]:
        pending = [cell for cell in group if not args.dry_run and states[cell.folder] != "done"]
        for cell in group:
            _log.info("[%d/%d] %s: %s", mine.index(cell) + 1, len(mine), cell.folder, "running" if cell in pending else states[cell.folder])
            if states[cell.folder] == "done" and not args.dry_run:
                _measure_anew(cell, output / cell.folder, args)
        code = _run_group(pending, output, args, execute or _execute) if pending else 0
        if code:
            failed += pending
            _log.error("%s: failed with exit code %d, going on with the others", pending[0].folder, code)
    for line in _summary([read_cell(output / cell.folder) for cell in mine if (output / cell.folder / METRICS).is_file()]):
        _log.info("%s", line)
    return 1 if failed else 0


def _run_group(cells: Sequence[MatrixCell], output: Path, args: argparse.Namespace, execute: Execute) -> int:
    """``run_group`` for one group of many: what is wrong with its files fails these cells only."""
    try:
        return run_group(cells, output, args, execute)
    except InputError as error:
        _log.error("%s: %s", cells[0].folder, error)
        return 2


def _measure_anew(cell: MatrixCell, folder: Path, args: argparse.Namespace) -> None:
    """A finished cell is measured again when measures, judgements or the treatment of missing queries changed; nothing is reranked."""
    metrics = read_cell(folder).metrics
    is_measured_so = list(metrics["measures"]) == list(cell.benchmark.measures)
    if not is_measured_so or any(metrics.get(key) != value for key, value in _judged_by(cell).items()):
        _measure(cell, folder, args)


def _judged_by(cell: MatrixCell) -> dict[str, Any]:
    return {"qrels_sha256": file_sha256(_qrels_path(cell)), "missing": cell.benchmark.missing}


def _qrels_path(cell: MatrixCell) -> Path:
    return Collection.open(cell.benchmark.collection).qrels_path or cell.benchmark.collection / "qrels.txt"


def run_group(cells: Sequence[MatrixCell], output: Path, args: argparse.Namespace, execute: Execute) -> int:
    """Rerank the cells of one forward in one process and measure each; returns rerank's exit code."""
    for cell in cells:
        folder = output / cell.folder
        folder.mkdir(parents=True, exist_ok=True)
        if args.restart:
            (folder / METRICS).unlink(missing_ok=True)
        write_json(folder / SETTINGS, cell.settings(_shared(args)))
    first, *others = cells
    if first.model is None:
        _write_first_stage(first, output / first.folder, Collection.open(first.benchmark.collection))
    else:
        words = rerank_arguments(first, output / first.folder, args)
        for cell in others:
            words += ["--also", f"{output / cell.folder}={cell.base_method}" + (f":{cell.heads}" if cell.heads else "")]
        code = execute(words)
        if code:
            return code
    for cell in cells:
        _measure(cell, output / cell.folder, args)
    return 0


def _measure(cell: MatrixCell, folder: Path, args: argparse.Namespace) -> None:
    """metrics.json of a cell whose run is there."""
    facts = read_facts(folder / RUN) | {"method": cell.method, "depth": cell.depth, "order": cell.order}
    facts |= {"model": cell.model.name if cell.model else None, "seed": cell.model.seed if cell.model else None, **_judged_by(cell)}
    qrels = read_qrels(_qrels_path(cell))
    only = _query_ids(args.only)
    evaluation = evaluate_run(read_run(folder / RUN), qrels, cell.benchmark.measures, missing=cell.benchmark.missing, query_ids=only)
    write_metrics(folder / RUN, facts, evaluation, qrels, cell.benchmark.name)


def rerank_arguments(cell: MatrixCell, folder: Path, args: argparse.Namespace) -> list[str]:
    """The `headrank rerank` command line of a cell."""
    assert cell.model is not None, "first-stage cells are not reranked"
    words = ["rerank", "--collection", str(cell.benchmark.collection), "--model", cell.model.path, "--method", cell.base_method]
    words += ["--depth", str(cell.depth), "--output", str(folder / RUN), "--scores", str(folder / SCORES), "--meta", str(folder / META)]
    words += ["--heads", cell.heads] if cell.heads else []
    words += ["--shuffle", str(args.shuffle_seed)] if cell.order == "shuffled" else []
    words += ["--order", "reversed"] if cell.order == "reversed" else []
    for name in ("only", "device", "dtype", "batch_size", "query_rows", "document_layout", "max_words", "api_base"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return words + (["--restart"] if args.restart else [])


def _execute(words: Sequence[str]) -> int:
    """Run one `headrank` verb in a process of its own, outside any process group of ours."""
    environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    return subprocess.run([sys.executable, "-m", "headrank", *words], env=environment, check=False).returncode


def _write_first_stage(cell: MatrixCell, folder: Path, collection: Collection) -> None:
    """A first-stage cell: the run as it is, its scores cut to the depth, no time and no model."""
    candidates = collection.run()
    write_run(folder / RUN, {query_id: [(row.doc_id, row.score) for row in rows] for query_id, rows in candidates.items()}, cell.method)
    lists = {query_id: rows[: cell.depth] for query_id, rows in candidates.items()}
    write_jsonl(
        folder / SCORES,
        (
            {
                "query_id": query_id,
                "doc_ids": [row.doc_id for row in rows],
                "scores": [row.score for row in rows],
                "ranks": [row.rank for row in rows],
                "seconds": 0.0,
                "tokens": 0,
                "is_shortened": False,
            }
            for query_id, rows in lists.items()
        ),
    )
    write_json(folder / META, {"method": cell.method, "num_queries": len(candidates)})


def _state(folder: Path, settings: dict[str, Any], restart: bool) -> str:
    """done, begun or new; a cell that was begun with other settings is refused."""
    if restart or not (folder / SETTINGS).is_file():
        return "new"
    before = read_json(folder / SETTINGS)
    now = json.loads(json.dumps(settings))
    if before != now:
        changed = [key for key in now if not isinstance(before, dict) or before.get(key) != now[key]]
        raise InputError(
            f"{folder}: was begun with another {changed[0] if changed else 'setting'}; use another --output, or --restart to do it again"
        )
    return "done" if (folder / METRICS).is_file() else "begun"


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that all cells have in common."""
    names = ("query_rows", "max_words", "dtype", "shuffle_seed", "api_base")
    layout = {} if args.document_layout is None else {"document_layout": args.document_layout}  # cells from before it stay done
    return {name: getattr(args, name) for name in names} | layout | {"only": sorted(_query_ids(args.only) or [])}


def _query_ids(path: str | None) -> set[str] | None:
    from headrank.formats import read_lines

    return {line.split()[0] for _, line in read_lines(path)} if path else None


def _benchmark(text: str, args: argparse.Namespace, find_benchmark: Resolver | None) -> MatrixBenchmark:
    """NAME=DIR or a folder as it is, else a registered name; --measures replaces the benchmark's own."""
    name, equals, folder = text.partition("=")
    measures = tuple(measure_name(measure) for measure in args.measures) if args.measures else None
    if equals or Path(text).is_dir():
        path = Path(folder if equals else text)
        if not path.is_dir():
            raise InputError(f"--benchmarks {text!r}: no such collection folder")
        return MatrixBenchmark(name if equals else path.resolve().name, path, 40, measures or ("nDCG@10",))
    if find_benchmark is None:
        raise InputError(f"--benchmarks {text!r}: not a folder; write NAME=DIR")
    found = find_benchmark(text)
    chosen = measures or tuple(map(measure_name, found.measures))
    return dataclasses.replace(found, measures=chosen)


def _heads(given: Sequence[str]) -> dict[str, str]:
    heads = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name:
            raise InputError(f"--heads {text!r}: write METHOD=FILE or MODEL/METHOD=FILE")
        heads[name] = path
    return heads


def _summary(cells: Sequence[Cell]) -> list[str]:
    """One line a finished cell."""
    lines = []
    for cell in cells:
        measures = "  ".join(f"{name} {100 * value:.2f}" for name, value in cell.metrics["measures"].items())
        seconds = cell.metrics.get("seconds_per_query")
        depth, order = cell.condition
        label = f"{cell.benchmark:<14} top{depth:<4} {order:<10} {cell.model or '-':<24} {method_name(cell.method):<22}"
        lines.append(label + f" {measures}" + (f"  {seconds:.2f} s/query" if seconds else ""))
    return lines
