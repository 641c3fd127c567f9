"""Measure runs against judgements: any measure of ir-measures, bootstrap intervals, paired tests with Holm's
correction.

  headrank evaluate --collection DIR --first-stage out.txt
  headrank evaluate --qrels qrels.txt BM25=run.bm25.txt icr.txt ours.txt --measures nDCG@10 R@2 R@5 RR --baseline all

A RUN is a TREC run, a directory with run.txt, or NAME=PATH. Values equal trec_eval's; a judged query that a run lacks
counts as zero (trec_eval -c) unless --missing skip.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import plain_or_gzipped, require_writable
from headrank.formats import Qrels, Run, atomic_write, read_qrels, read_query_ids, read_run

if TYPE_CHECKING:
    from headrank.evaluation.comparison import Comparison
    from headrank.evaluation.measures import Evaluation

_log = logging.getLogger(__name__)
DEFAULT_MEASURES = ("nDCG@10",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank evaluate`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="TREC run, directory with run.txt, or NAME=PATH")
    source = parser.add_argument_group("judgements")
    source.add_argument("--collection", metavar="DIR", help="take qrels.txt from this collection")
    source.add_argument("--qrels", metavar="FILE", help="TREC judgements")
    source.add_argument(
        "--first-stage", action="store_true", help="also evaluate the collection's own run, before the others"
    )
    source.add_argument("--only", metavar="FILE", help="evaluate only the query ids in this file")
    how = parser.add_argument_group("measuring")
    how.add_argument(
        "--measures",
        nargs="+",
        default=list(DEFAULT_MEASURES),
        metavar="M",
        help="nDCG@10 (default), R@5, RR@10, AP, P(rel=2)@5, ...",
    )
    how.add_argument(
        "--missing",
        choices=["zero", "skip"],
        default="zero",
        help="judged queries without results: zero (default) or left out",
    )
    how.add_argument(
        "--by-rank", action="store_true", help="trust the rank column; trec_eval (and the default) trusts the scores"
    )
    tests = parser.add_argument_group("uncertainty")
    tests.add_argument(
        "--baseline",
        metavar="NAME",
        help="run that the others are tested against (default: the first); 'all' tests every pair",
    )
    tests.add_argument(
        "--test", choices=["randomisation", "t"], default="randomisation", help="paired test (default randomisation)"
    )
    tests.add_argument("--level", type=float, default=0.95, help="confidence level of the intervals (default 0.95)")
    tests.add_argument(
        "--resamples",
        type=options.positive_int,
        default=10_000,
        metavar="N",
        help="bootstrap resamples (default 10000)",
    )
    tests.add_argument("--seed", type=options.seed, default=0, help="seed of bootstrap and randomisation (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument("--format", choices=["text", "markdown", "json"], default="text", help="default text")
    out.add_argument("--output", metavar="FILE", help="write there instead of to the screen")
    out.add_argument("--per-query", action="store_true", help="also every query's value")
    out.add_argument(
        "--write-metrics", action="store_true", help="write metrics.json beside each run, for 'headrank report'"
    )
    out.add_argument(
        "--benchmark", metavar="NAME", help="name of the collection in metrics.json (default: its folder's name)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, compare, write."""
    from headrank.evaluation.comparison import Settings, compare
    from headrank.evaluation.measures import evaluate_run

    qrels = read_qrels(_qrels_path(args))
    only = read_query_ids(args.only) if args.only else None
    if only is not None and (strange := only - qrels.keys()):
        _log.warning("%s: %d of its %d query ids are not judged and do not count", args.only, len(strange), len(only))
    paths = _named_runs(args)
    if args.output:
        require_writable(args.output, reads=[_qrels_path(args), args.only, *paths.values()])
    evaluations: dict[str, Evaluation] = {}
    for name, path in paths.items():
        loaded = read_run(path)
        evaluations[name] = evaluate_run(
            loaded, qrels, args.measures, missing=args.missing, by_rank=args.by_rank, query_ids=only
        )
        _warn(name, evaluations[name], loaded)
    settings = Settings(test=args.test, level=args.level, resamples=args.resamples, seed=args.seed)
    comparison = compare(evaluations, settings, args.baseline)
    if args.write_metrics:
        _write_metrics(args, paths, evaluations, qrels)
    text = _rendered(comparison, args)
    if args.output:
        with atomic_write(args.output) as stream:
            stream.write(text)
    else:
        print(text, end="")
    return 0


def _qrels_path(args: argparse.Namespace) -> Path:
    if args.qrels:
        return Path(args.qrels)
    if not args.collection:
        raise InputError("no judgements; give --qrels FILE or --collection DIR")
    return plain_or_gzipped(args.collection, "qrels.txt")


def _named_runs(args: argparse.Namespace) -> dict[str, Path]:
    """Name -> path, the first stage first; equal names become longer until they differ."""
    given = [("BM25", plain_or_gzipped(args.collection or "", "run.bm25.txt"))] if args.first_stage else []
    if args.first_stage and not args.collection:
        raise InputError("--first-stage needs --collection DIR: the run is taken from there")
    for text in args.runs:
        name, equals, path = text.partition("=")
        # a file may have = in its name
        if not equals or Path(text).exists():
            name, path = "", text
        file = Path(path) / "run.txt" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(f"run {text!r}: no such file; give a TREC run, a directory with run.txt, or NAME=PATH")
        given.append((name or (file.parent.resolve().name if file.name == "run.txt" else file.stem), file))
    swallowed = next((measure for measure in args.measures if Path(measure).exists()), None)
    if not given and swallowed is not None:
        raise InputError(f"--measures took {swallowed} for a measure; put the runs before --measures")
    if not given:
        raise InputError("no run to evaluate; name at least one, or give --first-stage")
    named: dict[str, Path] = {}
    for name, path in given:
        # runs/a/run.txt and runs/b/run.txt are both called run; the folder's name tells them apart
        while name in named:
            name = (
                f"{path.resolve().parent.name}/{name}"
                if f"{path.resolve().parent.name}/{name}" not in named
                else f"{name}'"
            )
        named[name] = path
    return named


def _warn(name: str, evaluation: Evaluation, loaded: Run) -> None:
    """Say what a person would otherwise not see in a mean."""
    if evaluation.num_missing:
        _log.warning("%s: %d judged queries have no results", name, evaluation.num_missing)
    if evaluation.num_unjudged:
        _log.warning(
            "%s: %d of its %d queries are not judged and do not count", name, evaluation.num_unjudged, len(loaded)
        )
    if evaluation.num_tied:
        _log.warning(
            "%s: %d queries have equal scores; trec_eval orders those by document id (--by-rank keeps the ranks)",
            name,
            evaluation.num_tied,
        )


def _write_metrics(
    args: argparse.Namespace, paths: dict[str, Path], evaluations: dict[str, Evaluation], qrels: Qrels
) -> None:
    from headrank.experiments.metrics_file import read_facts, write_metrics

    benchmark = args.benchmark or Path(args.collection or Path(args.qrels).parent).resolve().name
    written = {name: path for name, path in paths.items() if not (args.first_stage and name == "BM25")}
    # the second metrics.json would replace the first without a word
    folders = [path.resolve().parent for path in written.values()]
    if len(set(folders)) != len(folders):
        raise InputError(
            "--write-metrics: two runs share a directory, and metrics.json belongs to one; give each run its own "
            "directory"
        )
    for name, path in written.items():
        target = write_metrics(path, read_facts(path), evaluations[name], qrels, benchmark)
        _log.info("%s: written", target)


def _rendered(comparison: Comparison, args: argparse.Namespace) -> str:
    from headrank.reports.comparison_text import render

    if args.format == "json":
        return json.dumps(comparison.to_dict(per_query=args.per_query), indent=2) + "\n"
    return render(comparison, args.format, per_query=args.per_query)
