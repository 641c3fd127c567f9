"""Score every attention head of a model on judged candidate lists and keep the best K.

One forward per list serves every relevant document in it. Writes heads.json (ranked table of all heads, the chosen K,
l_max, what it was computed from) and a picture of the head map beside it. The same input gives the same file, byte for
byte. Several methods (or all) share the forwards and write one file each: heads.entropy.json, heads.core.json,
heads.qr.json, ... --method readout instead fits a weight to every head, on grades or on a teacher's scores:
commands/select_readout.py.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.commands import options, select_readout, selection_methods
from headrank.errors import InputError
from headrank.files import require_writable
from headrank.formats import Collection, read_query_ids
from headrank.methods import POLICIES
from headrank.reranking.model_sources import resolve_model

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet
    from headrank.method.prompt import PromptTemplate
    from headrank.reranking.reader import AttentionReader
    from headrank.selection.selection import RankedHeads, SelectionContext

_log = logging.getLogger(__name__)
READOUT = "readout"
MAX_PRINTED = 20  # heads; the file has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank select-heads`."""
    _add_input_arguments(parser)
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser).add_argument(
        "--prompt-of",
        metavar="FILE",
        help="the prompt of this heads.json or exported model where no switch is given: to select again after training",
    )
    group = parser.add_argument_group("selection")
    group.add_argument(
        "--output", metavar="FILE", required=True, help="heads.json to write; FILE's stem also names the picture"
    )
    group.add_argument(
        "--method",
        nargs="+",
        choices=[*POLICIES, "all", READOUT],
        default=["entropy"],
        help="how heads are scored (default entropy: Eq. 2-4); several share the forwards; readout: all heads, with "
        "fitted weights",
    )
    group.add_argument(
        "--top-k", type=options.positive_int, metavar="K", help="heads to keep (default 8; 16 for qr and qr-ndcg)"
    )
    group.add_argument(
        "--depth", type=options.positive_int, default=40, metavar="N", help="candidates in a list (default 40)"
    )
    _add_order_arguments(group)
    selection_methods.add_arguments(group)
    group.add_argument(
        "--prune", type=float, default=0.0, metavar="F", help="leave out this fraction of the layers, from the top"
    )
    group.add_argument(
        "--batch-size", type=options.positive_int, default=1, metavar="B", help="lists per forward (default 1)"
    )
    group.add_argument(
        "--cache", metavar="DIR", help="keep the statistics of every list here: resume, or try other settings for free"
    )
    group.add_argument(
        "--compare-paper",
        nargs="?",
        const="auto",
        metavar="MODEL",
        help="select as the paper does under every --query-rows (or the given one), write a file for each, and "
        "count the heads of the "
        "paper's table among them; MODEL is Qwen3-0.6B, -1.7B or -4B where the model's name does not say so",
    )
    group.add_argument("--no-picture", action="store_true", help="write heads.json only")
    select_readout.add_arguments(parser)


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("collections")
    group.add_argument(
        "--collection",
        metavar="DIR",
        action="append",
        help="queries.tsv, corpus.jsonl[.gz], qrels.txt, run.bm25.txt; may be given again",
    )
    group.add_argument(
        "--contexts",
        metavar="DIR",
        action="append",
        help="instead: the lists of a folder of 'headrank pairs', with their grades; may be given again",
    )
    group.add_argument(
        "--paragraphs",
        metavar="FILE.json",
        action="append",
        help="instead: questions with labelled paragraphs: CoRe's and QR's detection data, HippoRAG's and ICR's "
        "files; may be given again",
    )
    for name in ("queries", "corpus", "qrels", "run"):
        group.add_argument(f"--{name}", metavar="FILE", help=f"with at most one collection: {name} instead of its own")
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument("--only", metavar="FILE", help="query ids, one per line, to use; all others are left out")
    chosen.add_argument("--hold-out", metavar="FILE", help="query ids, one per line, to leave out")


def _add_order_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--permutations",
        type=int,
        default=0,
        metavar="N",
        help="use N random orders of every list, so that no head is chosen for its position",
    )
    group.add_argument("--no-retriever-order", action="store_true", help="with --permutations: the random orders only")
    group.add_argument("--seed", type=int, default=0, help="seed of the random orders and the needles (default 0)")


def run(args: argparse.Namespace) -> int:
    """Select and write; returns the exit code."""
    if not 0 <= args.prune < 1:
        raise InputError(f"--prune {args.prune} must be at least 0 and below 1")
    if args.permutations < 0:
        raise InputError(f"--permutations {args.permutations} must not be negative")
    if args.no_retriever_order and not args.permutations:
        raise InputError("--no-retriever-order leaves no order of a list; add --permutations N")
    if args.compare_paper is not None:
        from headrank.commands import compare_heads

        require_writable(args.output)
        for path in compare_heads.run(args, lambda chosen: _attention_selection(chosen, ["entropy"])[0]):
            print(path)
        return 0
    methods = list(POLICIES) if "all" in args.method else list(dict.fromkeys(args.method))
    if READOUT in methods and len(methods) > 1:
        raise InputError("--method readout has statistics of its own; run it alone")
    paths = {method: _output_path(args.output, method, is_one_of_several=len(methods) > 1) for method in methods}
    for path in paths.values():
        if path.is_dir():
            raise InputError(f"{path}: cannot be written, it is a folder; give the name of a file")
        require_writable(path)
    if methods == [READOUT]:
        _write(select_readout.fit_readout(args), paths[READOUT], not args.no_picture)
        return 0
    results = []
    if methods != ["niah"]:
        results += _attention_selection(args, [method for method in methods if method != "niah"])
    if "niah" in methods:
        collections = _collections(args) if args.collection or args.corpus else []
        selection, shape, source = selection_methods.ask_needles(args, collections)
        results.append(_head_set(selection, args, shape, source))
    for heads in results:
        _write(heads, paths[heads.method], not args.no_picture)
    return 0


def _attention_selection(args: argparse.Namespace, methods: list[str]) -> list[HeadSet]:
    """All policies that read prefill attention, from one forward per list."""
    from headrank.selection.selection import accumulate
    from headrank.selection.statistics import StatisticsCache, reader_key

    contexts = _contexts(args)
    policies = [selection_methods.policy(method, args, contexts) for method in methods]
    reader = _load_reader(args)
    num_layers = _pruned(reader.num_layers, args.prune)
    if (args.top_k or 0) > num_layers * reader.num_heads:
        raise InputError(
            f"--top-k {args.top_k} is more than the {num_layers * reader.num_heads} heads of the {num_layers} "
            "layers read"
        )
    cache = StatisticsCache(args.cache, reader_key(reader)) if args.cache else None
    bar = options.progress(contexts, total=len(contexts), description="select-heads", unit="list")
    with contextlib.closing(bar):  # an error has its line to itself
        facts = accumulate(reader, bar, policies, num_layers=num_layers, batch_size=args.batch_size, cache=cache)
    source = {"collections": sorted({context.collection for context in contexts}), **facts}
    depth = max(len(context.grades) for context in contexts) if args.contexts or args.paragraphs else args.depth
    settings = {"depth": depth, "permutations": args.permutations, "seed": args.seed, "layers_read": num_layers}
    settings["with_retriever_order"] = not args.no_retriever_order
    return [_head_set(policy, args, (reader.num_layers, reader.num_heads), source, settings) for policy in policies]


def _prompt(args: argparse.Namespace) -> PromptTemplate:
    return options.prompt_from(args, options.prompt_of(args.prompt_of) if args.prompt_of is not None else None)


def _load_reader(args: argparse.Namespace) -> AttentionReader:
    from headrank.model_config import model_size
    from headrank.reranking.reader import AttentionReader

    model = resolve_model(args.model)
    last_layer = _pruned(model_size(model)[0], args.prune) - 1
    return AttentionReader.load(
        model, prompt=_prompt(args), last_layer=last_layer, device=args.device, dtype=args.dtype
    )


def _pruned(num_layers: int, fraction: float) -> int:
    """Layers left after pruning, as CoRe counts them; at least one."""
    return max(1, int(num_layers * (1 - fraction)))


def _contexts(args: argparse.Namespace) -> list[SelectionContext]:
    from headrank.selection.selection import collection_contexts

    contexts = []
    if args.contexts or args.paragraphs:
        from data_tools.selection_lists import paragraph_contexts, training_contexts

        _refuse_beside_lists(args)
        orders = {
            "permutations": args.permutations,
            "with_retriever_order": not args.no_retriever_order,
            "seed": args.seed,
        }
        for folder in args.contexts or []:
            contexts += training_contexts(folder, _prompt(args), **orders)
        for path in args.paragraphs or []:
            contexts += paragraph_contexts(path, _prompt(args), **orders)
        return contexts
    for collection in _collections(args):
        contexts += collection_contexts(
            collection,
            _prompt(args),
            depth=args.depth,
            permutations=args.permutations,
            with_retriever_order=not args.no_retriever_order,
            seed=args.seed,
            only=read_query_ids(args.only) if args.only else None,
            hold_out=read_query_ids(args.hold_out) if args.hold_out else (),
        )
    return contexts


def _refuse_beside_lists(args: argparse.Namespace) -> None:
    """The lists of a folder or file are complete: what would choose others is a mistake. niah may still take its hay
    from a collection.
    """
    names = ["queries", "qrels", "run", "only", "hold_out"]
    if not {"niah", "all"} & set(args.method):
        names += ["collection", "corpus"]
    given = [name for name in names if getattr(args, name)]
    if given:
        flag = given[0].replace("_", "-")
        source = "--contexts" if args.contexts else "--paragraphs"
        raise InputError(
            f"{source} and --{flag} both say which lists to read; choose queries and candidates when these lists "
            "are made"
        )


def _collections(args: argparse.Namespace) -> list[Collection]:
    single = {name: getattr(args, name) for name in ("queries", "corpus", "qrels", "run")}
    folders = args.collection or []
    if len(folders) > 1 and any(single.values()):
        raise InputError("--queries, --corpus, --qrels and --run go with one --collection, not with several")
    return [Collection.open(folder, **single) for folder in folders or [None]]


def _head_set(
    selection: RankedHeads,
    args: argparse.Namespace,
    shape: tuple[int, int],
    source: dict[str, Any],
    settings: dict[str, Any] | None = None,
) -> HeadSet:
    from headrank.selection.selection import make_head_set

    return make_head_set(
        selection,
        model=args.model,
        num_layers=shape[0],
        num_heads=shape[1],
        prompt=_prompt(args),
        top_k=args.top_k,
        settings=settings,
        source=source,
    )


def _output_path(output: str, method: str, *, is_one_of_several: bool) -> Path:
    """heads.json, or heads.core.json when several methods are selected at once."""
    path = Path(output)
    return path.with_name(f"{path.stem}.{method}{path.suffix or '.json'}") if is_one_of_several else path


def _write(heads: HeadSet, path: Path, with_picture: bool) -> None:
    """Save, draw, and print the chosen heads with their columns."""
    heads.save(path)
    pictures = _draw(heads, path) if with_picture else []
    columns = [name for name in heads.table[0] if name not in ("rank", "name", "layer", "head", "is_chosen")]
    depth = f"l_max {heads.l_max}: {heads.l_max + 1} of {heads.num_layers} layers are computed"
    print(f"{heads.method}: {len(heads.heads)} of {len(heads.table)} heads, {depth}")
    print(f"{'rank':>4}  {'head':<8}" + "".join(f"{name:>12}" for name in columns))
    for row in heads.table[: min(len(heads.heads), MAX_PRINTED)]:
        print(f"{row['rank']:>4}  {row['name']:<8}" + "".join(f"{row[name]:>12.5g}" for name in columns))
    print(f"wrote {', '.join(map(str, [path, *pictures]))}")


def _draw(heads: HeadSet, path: Path) -> list[Path]:
    try:
        from headrank.reports.figures import draw_head_map, draw_readout
    except ImportError as error:  # matplotlib is an extra
        _log.warning("no picture of the head map: %s", error)
        return []
    return (draw_head_map if heads.readout is None else draw_readout)(heads, path.with_suffix(""))
