"""headrank select-heads --method readout: fit a weight per head to labelled lists, by log mass, in any layout.

One forward per list gives the statistics of all heads; every depth, budget, floor and L2 is then tried on these. Prints
the table of nested cross-validation and writes heads.json with the cheapest readout within --tolerance of the best,
fitted on all lists.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.artifacts import content_digest
from headrank.commands import options
from headrank.errors import InputError
from headrank.files import read_json, require_writable, write_json
from headrank.formats import Collection, read_query_ids
from headrank.reranking.model_sources import resolve_model

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet
    from headrank.method.prompt import PromptTemplate
    from headrank.reranking.reader import AttentionReader
    from headrank.selection.readout_lists import ReadoutList
    from headrank.selection.readout_statistics import ReadoutStatistics
    from headrank.selection.readout_validation import CrossValidation, Fitted, Row

_log = logging.getLogger(__name__)
LABELS = ("teacher", "judged", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that only --method readout reads."""
    group = parser.add_argument_group("readout (with --method readout)")
    group.add_argument(
        "--labels",
        metavar="RUN",
        action="append",
        help="a scored run for each --collection, in the same order: a teacher's labels",
    )
    group.add_argument("--fit-to", choices=LABELS, help="teacher (default with --labels), judged, or both, half each")
    group.add_argument(
        "--lists",
        type=options.positive_int,
        metavar="N",
        help="at most N lists of each collection (a sample that only grows)",
    )
    group.add_argument(
        "--list-words",
        type=options.positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help="cut the passages of each list to one of these",
    )
    group.add_argument(
        "--branch-position",
        type=options.positive_int,
        default=512,
        metavar="P",
        help="where the query begins (default 512)",
    )
    group.add_argument(
        "--max-layer", type=options.positive_int, nargs="+", metavar="N", help="layers computed; several are compared"
    )
    group.add_argument(
        "--groups",
        type=options.positive_int,
        nargs="+",
        metavar="N",
        help="at most N (layer, key-value group) pairs; several are compared",
    )
    group.add_argument(
        "--tolerance", type=float, default=0.0, metavar="T", help="points of nDCG@10 that a cheaper readout may lose"
    )
    group.add_argument("--l2", type=float, nargs="+", metavar="L", help="penalties that cross-validation chooses among")
    group.add_argument(
        "--floor", type=float, nargs="+", metavar="F", help="floors under the log that it chooses among (default 0.1)"
    )
    group.add_argument(
        "--equal-weights", action="store_true", help="choose groups, but let every head count alike: for comparison"
    )
    group.add_argument("--folds", metavar="FILE", help="lines 'query-id fold' (default: --num-folds by query id)")
    group.add_argument(
        "--num-folds", type=options.positive_int, default=5, metavar="N", help="folds of the queries (default 5)"
    )
    group.add_argument("--report", metavar="FILE", help="keep the table as JSON, with every query's held-out value")
    group.add_argument(
        "--test-length", action="store_true", help="one row more: with the log of the length, which no readout can hold"
    )


def fit_readout(args: argparse.Namespace) -> HeadSet:
    """Read the lists, get their statistics, cross-validate, fit; prints the table."""
    if args.equal_weights and args.test_length:
        raise InputError(
            "--test-length asks whether a fit uses the length, and --equal-weights fits nothing; leave one out"
        )
    from headrank.selection.readout_validation import (
        CrossValidation,
        FitSettings,
        Size,
        cheapest_within,
        make_folds,
        read_folds,
    )

    if args.report:
        require_writable(args.report)
    lists = _lists(args)
    label_source = args.fit_to or ("teacher" if args.labels else "judged")
    reader, prompt = _reader(args)
    depths = sorted(set(args.max_layer or [reader.num_layers]))
    if depths[-1] > reader.num_layers:
        raise InputError(f"--max-layer {depths[-1]}: the model has {reader.num_layers} layers")
    statistics = _statistics(args, reader, prompt, lists, depths[-1])
    l2 = FitSettings.l2[:1] if args.equal_weights else tuple(args.l2 or FitSettings.l2)
    settings = FitSettings(label_source, l2, tuple(args.floor or FitSettings.floors), is_equal=args.equal_weights)
    num_groups = int(getattr(reader.config, "num_key_value_heads", None) or reader.num_heads)
    shape = {"num_heads": reader.num_heads, "group_size": reader.num_heads // num_groups}
    folds = read_folds(args.folds, lists) if args.folds else make_folds(lists, args.num_folds)
    ratios, lengths = [one.ratios_NKR for one in statistics], [one.lengths_N for one in statistics]
    validation = CrossValidation(lists, ratios, lengths, folds, settings=settings, **shape)
    sizes = [Size(depth, budget) for depth in depths for budget in (args.groups or [None])]
    rows = []
    for size in options.progress(sizes, total=len(sizes), description="cross-validation", unit="size"):
        rows.append(validation.row(size))
    chosen = cheapest_within(rows, args.tolerance)
    extra = []
    if args.test_length:
        wider = dataclasses.replace(settings, with_length=True)
        extra = [CrossValidation(lists, ratios, lengths, folds, settings=wider, **shape).row(chosen.size)]
    _print_table(validation, rows, chosen, extra)
    if args.report:
        _write_report(args.report, validation, rows, chosen, extra)
    fitted = validation.fit(chosen.size)
    return _head_set(args, reader, prompt, validation, fitted, rows, chosen)


def _lists(args: argparse.Namespace) -> list[ReadoutList]:
    from headrank.selection.readout_lists import collection_lists

    if args.contexts:
        raise InputError("--method readout reads --collection and --labels; leave out --contexts")
    folders, labels = args.collection or [], args.labels or []
    if labels and len(labels) != max(1, len(folders)):
        raise InputError(
            f"--labels was given {len(labels)} times for {len(folders)} collections; give one run for each, in the "
            "same order"
        )
    if args.fit_to in ("teacher", "both") and not labels:
        raise InputError(f"--fit-to {args.fit_to} needs the teacher's runs; give --labels (see 'headrank label')")
    single = {name: getattr(args, name) for name in ("queries", "corpus", "qrels", "run")}
    if len(folders) > 1 and any(single.values()):
        raise InputError("--queries, --corpus, --qrels and --run go with one --collection, not with several")
    only = read_query_ids(args.only) if args.only else None
    left_out = read_query_ids(args.hold_out) if args.hold_out else set()
    found = []
    for place, folder in enumerate(folders or [None]):
        collection = Collection.open(folder, **single)
        wanted = only if not left_out else set(collection.queries()) - left_out
        run = labels[place] if labels else None
        found += collection_lists(
            collection, run, depth=args.depth, list_words=args.list_words, most_lists=args.lists, only=wanted
        )
    return found


def _reader(args: argparse.Namespace) -> tuple[AttentionReader, PromptTemplate]:
    """The model, as deep as it has to be, and the prompt: short in the late layout, the default one in the others."""
    from headrank.method.prompt import PromptTemplate
    from headrank.reranking.reader import AttentionReader

    is_late = (args.document_layout or "late") == "late"
    last_layer = max(args.max_layer) - 1 if args.max_layer else None
    first = PromptTemplate(document_layout="late") if is_late else PromptTemplate()
    reader = AttentionReader.load(
        resolve_model(args.model),
        prompt=first,
        last_layer=last_layer,
        device=args.device,
        dtype=args.dtype or ("auto" if is_late else None),
    )
    if args.prompt_of is not None:
        base = options.prompt_of(args.prompt_of)
    elif is_late:
        base = PromptTemplate.short(reader.tokenizer, document_layout="late", branch_position=args.branch_position)
    else:
        base = PromptTemplate()
    return reader, options.prompt_from(args, base)


def _statistics(
    args: argparse.Namespace, reader: AttentionReader, prompt: PromptTemplate, lists: list[ReadoutList], num_layers: int
) -> list[ReadoutStatistics]:
    """One forward per list, or what an earlier run kept."""
    from headrank.selection.readout_statistics import LateStatistics, PromptStatistics, ReadoutStatisticsCache
    from headrank.selection.statistics import reader_key

    reader.use_prompt(prompt)
    source = (
        LateStatistics(reader, prompt, num_layers) if prompt.is_late else PromptStatistics(reader, prompt, num_layers)
    )
    cache = ReadoutStatisticsCache(args.cache, reader_key(reader), prompt) if args.cache else None
    found = []
    bar = options.progress(lists, total=len(lists), description="statistics", unit="list")
    with contextlib.closing(bar):
        for one in bar:
            kept = cache.load(one.query, one.documents, num_layers * reader.num_heads) if cache else None
            if kept is None:
                kept = source.of(one.query, one.documents)
                if cache:
                    cache.save(one.query, one.documents, kept)
            found.append(kept)
    return found


def _print_table(validation: CrossValidation, rows: list[Row], chosen: Row, extra: list[Row]) -> None:
    """Nested cross-validation, a line for each size; the chosen one is marked."""
    first, first_by, _ = validation.first_stage()
    names = sorted({name for row in rows for name in row.by_collection})
    what = "nDCG@10" if names else "pairs"
    short = [name.removeprefix("train-")[:12] for name in names]
    print(
        f"  {'layers':>6} {'groups':>6} {what:>8} {'pairs':>6} "
        + " ".join(f"{name:>12}" for name in short)
        + "  floor, l2 of each fold"
    )
    if names:
        print(f"  {'first stage':>13} {first:8.2f} {'':>6} " + " ".join(f"{first_by[name]:12.2f}" for name in names))
    for row in [*rows, *extra]:
        mark = "*" if row is chosen else "+" if row in extra else " "
        budget = "all" if row.size.num_groups is None else str(row.size.num_groups)
        settings = " ".join(f"{floor:g},{l2:g}" for floor, l2 in row.chosen)
        print(
            f"{mark} {row.size.num_layers:>6} {budget:>6} {row.quality:8.2f} {row.accuracy:6.2f} "
            + " ".join(f"{row.by_collection[name]:12.2f}" for name in names)
            + f"  {settings}"
        )
    print("* is taken" + ("; + is that size with the log of the length beside the heads" if extra else ""))


def _write_report(path: str, validation: CrossValidation, rows: list[Row], chosen: Row, extra: list[Row]) -> None:
    """The table, and under it the value of every query: for paired tests against other runs of the same folds."""
    first, first_by, first_queries = validation.first_stage()
    named = [(row, {"is_chosen": row is chosen, "with_length": row in extra}) for row in [*rows, *extra]]
    values = {
        "measure": "nDCG@10 x 100" if first_queries else "ordered pairs x 100",
        "labels": validation.settings.labels,
        "floors": list(validation.settings.floors),
        "folds": {one.key: int(fold) for one, fold in zip(validation.lists, validation.folds, strict=True)},
        "first_stage": {
            "quality": round(first, 2),
            "by_collection": _two_digits(first_by),
            "per_query": _two_digits(first_queries),
        },
        "rows": [
            {**row.to_dict(), **more, "settings": row.chosen, "per_query": _two_digits(row.per_query)}
            for row, more in named
        ],
    }
    write_json(path, values)


def _two_digits(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def _head_set(
    args: argparse.Namespace,
    reader: AttentionReader,
    prompt: PromptTemplate,
    validation: CrossValidation,
    fitted: Fitted,
    rows: list[Row],
    chosen: Row,
) -> HeadSet:
    """The fitted readout as a HeadSet, its heads by importance: the weight times the head's deviation within lists."""
    from headrank.method.heads import HeadSet, head_name
    from headrank.method.readout import Readout
    from headrank.provenance import versions

    used = [index for index in range(len(fitted.weights_K)) if fitted.weights_K[index] != 0.0]
    used.sort(key=lambda index: (-abs(fitted.scaled_K[index]), index))
    heads = tuple(divmod(index, reader.num_heads) for index in used)
    counts: dict[str, int] = {}
    for one in validation.lists:
        counts[one.collection] = counts.get(one.collection, 0) + 1
    fit: dict[str, Any] = {
        "labels": validation.settings.labels,
        **({"weights": "equal"} if validation.settings.is_equal else {}),
        "lists": counts,
        "list_words": args.list_words,
        "depth": args.depth,
        "l2": fitted.l2,
        "layers": fitted.size.num_layers,
        "groups": len(fitted.groups),
        "teacher": [_teacher(path) for path in args.labels or []],
        "folds": content_digest(args.folds) if args.folds else f"{args.num_folds} by query id",
        "cross_validation": [{**row.to_dict(), "is_chosen": row is chosen} for row in rows],
    }
    table = tuple(
        {
            "rank": rank,
            "name": head_name(head),
            "layer": head[0],
            "head": head[1],
            "weight": _rounded(fitted.weights_K[index]),
            "importance": _rounded(fitted.scaled_K[index]),
        }
        for rank, (head, index) in enumerate(zip(heads, used, strict=True), start=1)
    )
    readout = Readout(
        "log-mass",
        weights=tuple(_rounded(fitted.weights_K[index]) for index in used),
        floor=fitted.floor,
        offsets=tuple(_rounded(fitted.offsets_K[index]) for index in used) if fitted.floor else (),
        fit=fit,
    )
    return HeadSet(
        heads,
        "readout",
        args.model,
        reader.num_layers,
        reader.num_heads,
        prompt=prompt,
        source={"collections": sorted(counts), "num_lists": len(validation.lists), "versions": versions()},
        table=table,
        readout=readout,
    )


def _teacher(path: str) -> dict[str, Any]:
    """The labels' file by digest, and what its provenance beside it says of the teacher."""
    facts: dict[str, Any] = {"file": Path(path).name, "sha256": content_digest(path)}
    beside = Path(f"{path}.json")
    if beside.is_file():
        values = read_json(beside)
        if isinstance(values, dict):
            facts |= {name: values[name] for name in ("tag", "queries", "passages") if name in values}
    return facts


def _rounded(value: float) -> float:
    """Seven digits: what float32 holds."""
    return float(f"{value:.7g}")
