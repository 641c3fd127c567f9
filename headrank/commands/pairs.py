"""ALPS: preference pairs of adjacent grades (3 over 2, 2 over 1, 1 over 0) from judged candidates.

Writes contexts.jsonl (one candidate list per line), pairs.jsonl (one preference per line) and pairs.summary.json
(settings and counts) to --output and prints the table of what was found. The same input and seed give the same bytes.
With --show N it prints the N-th context of an existing --output as a person would read it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.labels.grades import QRELS_MODES
from data_tools.pairs import SUBLISTS_BY
from headrank.commands.options import add_prompt_arguments, positive_int, prompt_from
from headrank.errors import InputError
from headrank.formats import Collection, read_query_ids
from headrank.reranking.model_sources import resolve_model

if TYPE_CHECKING:
    from data_tools.build_pairs import PairCounts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--output", metavar="DIR", required=True, help="folder for contexts.jsonl and pairs.jsonl")
    _add_input_arguments(parser)
    group = parser.add_argument_group("pairs")
    group.add_argument(
        "--depth",
        type=positive_int,
        default=100,
        metavar="N",
        help="candidates used per query (default 100, the paper's)",
    )
    group.add_argument(
        "--unjudged-as-zero",
        action="store_true",
        help="treat candidates without a judgement as grade 0 (default: ignore them)",
    )
    group.add_argument(
        "--judged-only",
        action="store_true",
        help="leave candidates without a judgement out of the contexts: shorter lists, more pairs per token",
    )
    group.add_argument(
        "--max-pairs-per-query",
        type=positive_int,
        metavar="N",
        help="keep at most N pairs per context, balanced over grade levels",
    )
    group.add_argument(
        "--random-pairs", action="store_true", help="the ablation: as many pairs, drawn from all with different grades"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of everything drawn at random (default 0)")
    group.add_argument(
        "--compare-paper", action="store_true", help="say how far the counts are from the paper's training set"
    )
    _add_list_arguments(parser.add_argument_group("lists"))
    shown = parser.add_argument_group("showing a sample")
    shown.add_argument(
        "--show", type=int, metavar="N", help="print context N (from 0) of --output instead of building anything"
    )
    shown.add_argument(
        "--model", metavar="M", default="embedded", help="with --show: whose tokenizer counts the tokens"
    )
    shown.add_argument(
        "--words",
        type=positive_int,
        default=40,
        metavar="N",
        help="with --show: words shown of each document (default 40)",
    )
    add_prompt_arguments(parser)


def _add_list_arguments(group: argparse._ArgumentGroup) -> None:
    """What the lists of a query are: all its candidates, sub-lists, shortened passages."""
    group.add_argument(
        "--sublists",
        type=int,
        default=0,
        metavar="N",
        help="N random sub-lists of each query's candidates instead of the whole list",
    )
    group.add_argument(
        "--sublist-size",
        type=_size_range,
        metavar="M[-N]",
        help="documents of a sub-list (default 20); 8-24 draws a length for each, so that no place in the prompt is "
        "always the last",
    )
    group.add_argument(
        "--list-words",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help="cut the passages of each list to one of these numbers of words, drawn per query (default: whole "
        "passages, of which training "
        "keeps the prompt's --max-words): shorter ones train faster, mixed ones keep scores right at any length",
    )
    group.add_argument("--keep-full-list", action="store_true", help="with --sublists: the whole list as well")


def _size_range(text: str) -> tuple[int, int]:
    """M or M-N as (smallest, largest)."""
    smallest, dash, largest = text.partition("-")
    return positive_int(smallest), positive_int(largest if dash else smallest)


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("collections")
    group.add_argument(
        "--collection",
        metavar="DIR",
        action="append",
        help="queries.tsv, corpus.jsonl[.gz], qrels.txt, run.bm25.txt; may be given again",
    )
    group.add_argument("--queries", metavar="FILE", help="with at most one collection: these queries")
    group.add_argument("--corpus", metavar="FILE", help="with at most one collection: this corpus")
    group.add_argument("--qrels", metavar="FILE", help="with at most one collection: these judgements")
    group.add_argument("--run", metavar="FILE", help="with at most one collection: these candidates")
    _add_label_arguments(parser)
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument("--hold-out", metavar="FILE", help="query ids, one per line, to leave out (a development set)")
    chosen.add_argument("--only", metavar="FILE", help="query ids, one per line, to keep; all others are left out")


def _add_label_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("labels of a teacher ('headrank label', or any scored TREC run)")
    group.add_argument(
        "--labels",
        metavar="RUN",
        action="append",
        help="a teacher's run instead of the judgements, one for each --collection in their order, or one folder with "
        "<collection>.*.trec; every document of contexts.jsonl keeps its score",
    )
    levels = group.add_mutually_exclusive_group()
    levels.add_argument(
        "--label-quantiles",
        type=float,
        nargs="+",
        metavar="Q",
        help="grades within each list: one level per quantile of its scores (default 0.5 0.75 0.9)",
    )
    levels.add_argument(
        "--label-thresholds",
        type=float,
        nargs="+",
        metavar="S",
        help="grades on the teacher's own scale: one level per score that is reached, such as -4 0 4",
    )
    group.add_argument(
        "--qrels-with-labels",
        choices=QRELS_MODES,
        default="ignore",
        help="what judgements add to the teacher: nothing (default); keep the grades of judged documents; or "
        "positives: documents judged "
        "relevant get the top grade",
    )
    group.add_argument(
        "--sublists-by",
        choices=SUBLISTS_BY,
        default="chance",
        help="how sub-lists are drawn: by chance with an adjacent pair in each (default), or one document from each "
        "stratum of the "
        "teacher's order, as the late layout wants it: --sublists 1 --sublist-size 8 --sublists-by score",
    )


def run(args: argparse.Namespace) -> int:
    """Build the pairs and print their table, or show one context."""
    if args.show is not None:
        return _show(args)
    from data_tools.build_pairs import PairSettings, build_pairs
    from data_tools.labels.grades import GradeSettings
    from data_tools.labels.sources import find_label_runs

    for flag in ("sublist_size", "keep_full_list"):
        if getattr(args, flag) and not args.sublists:
            raise InputError(f"--{flag.replace('_', '-')} is about sub-lists; add --sublists N")
    _check_label_flags(args)
    collections = _collections(args)
    grades = GradeSettings(qrels=args.qrels_with_labels)
    if given := args.label_quantiles or args.label_thresholds:
        grades = GradeSettings(
            "quantiles" if args.label_quantiles else "thresholds", tuple(given), args.qrels_with_labels
        )
    settings = PairSettings(
        depth=args.depth,
        unjudged_as_zero=args.unjudged_as_zero,
        judged_only=args.judged_only,
        random_pairs=args.random_pairs,
        max_pairs=args.max_pairs_per_query or 0,
        sublists=args.sublists,
        sublist_size=args.sublist_size or PairSettings.sublist_size,
        keep_full_list=args.keep_full_list,
        sublists_by=args.sublists_by,
        list_words=tuple(args.list_words),
        seed=args.seed,
    )
    counts = build_pairs(
        collections,
        Path(args.output),
        settings,
        hold_out=read_query_ids(args.hold_out) if args.hold_out else (),
        only=read_query_ids(args.only) if args.only else None,
        label_runs=find_label_runs(args.labels, collections) if args.labels else (),
        grades=grades,
    )
    print(format_table(counts))
    if args.compare_paper:
        print(_compared_with_paper(counts))
    return 0


def _check_label_flags(args: argparse.Namespace) -> None:
    if args.sublists_by == "score" and not args.sublists:
        raise InputError("--sublists-by is about sub-lists; add --sublists N")
    flags = {
        "--label-quantiles": args.label_quantiles,
        "--label-thresholds": args.label_thresholds,
        "--qrels-with-labels": args.qrels_with_labels != "ignore",
        "--sublists-by score": args.sublists_by == "score",
    }
    needless = next((flag for flag, value in flags.items() if value), None)
    if needless is not None and not args.labels:
        raise InputError(f"{needless} is about a teacher's scores; add --labels RUN")


def _collections(args: argparse.Namespace) -> list[Collection]:
    single = {name: getattr(args, name) for name in ("queries", "corpus", "qrels", "run")}
    folders = args.collection or []
    if len(folders) > 1 and any(single.values()):
        raise InputError("--queries, --corpus, --qrels and --run go with one --collection, not with several")
    if len(folders) > 1:
        return [Collection.open(folder) for folder in folders]
    return [Collection.open(folders[0] if folders else None, **single)]


def format_table(counts: list[PairCounts]) -> str:
    """The table as text: one column per collection, and their sum when there are several."""
    from headrank.reports.grids import Grid
    from headrank.reports.table_text import to_text

    steps = sorted({step for count in counts for step in count.steps})
    rows: list[tuple[str, list[int]]] = [
        ("queries", [count.queries for count in counts]),
        ("queries without judgements", [count.unjudged_queries for count in counts]),
        ("queries without pairs", [count.queries_without_pairs for count in counts]),
        ("contexts", [count.contexts for count in counts]),
        ("candidates", [count.documents for count in counts]),
        ("judged candidates", [count.judged_documents for count in counts]),
        *[(f"pairs {high} > {low}", [count.steps[high, low] for count in counts]) for high, low in steps],
        ("pairs", [count.pairs for count in counts]),
    ]
    header = [count.name for count in counts] + (["all"] if len(counts) > 1 else [])
    lines = [(name, [f"{value:,}" for value in (values + [sum(values)])[: len(header)]]) for name, values in rows]
    judged = sum(count.queries - count.unjudged_queries for count in counts)
    means = [count.pairs_per_query for count in counts] + [sum(count.pairs for count in counts) / max(judged, 1)]
    lines.append(("pairs per judged query", [f"{mean:,.1f}" for mean in means[: len(header)]]))
    grid = Grid("", ("", *header), tuple((name, *cells) for name, cells in lines))
    return to_text(grid, numbers=range(1, len(header) + 1)).rstrip("\n")


def _compared_with_paper(counts: list[PairCounts]) -> str:
    from headrank.evaluation.published import TRAINING_PAIRS, TRAINING_QUERIES

    queries = sum(count.queries - count.unjudged_queries for count in counts)
    pairs = sum(count.pairs for count in counts)
    return (
        f"the paper: {TRAINING_QUERIES} queries, about {TRAINING_PAIRS:,} pairs; "
        f"here: {queries} queries ({queries - TRAINING_QUERIES:+d}), {pairs:,} pairs "
        f"({100 * (pairs / TRAINING_PAIRS - 1):+.1f} %)"
    )


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from data_tools.contexts import CONTEXTS_FILE
    from data_tools.show_sample import render_context
    from headrank.method.spans import PromptEncoder
    from headrank.reranking.model_sources import load_tokenizer

    if not (Path(args.output) / CONTEXTS_FILE).is_file():
        raise InputError(f"{args.output}: has no {CONTEXTS_FILE} to show; build it first, without --show")
    tokenizer = load_tokenizer(resolve_model(args.model), f"--model {args.model}")
    encoder = PromptEncoder(tokenizer, prompt_from(args))
    console = Console()
    for part in render_context(Path(args.output), args.show, encoder, args.words):
        console.print(part)
    return 0
