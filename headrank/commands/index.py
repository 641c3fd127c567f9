"""Compute the keys of a corpus once and keep them: a passage store, from which 'rerank --store' scores lists in
milliseconds.

For heads of the late layout. A stopped or killed run goes on where it stopped; passages that are there are not computed
again. On several GPUs or processes: torchrun --nproc-per-node N -m headrank index ..., or --ray. --info, --verify and
--prune look after a store.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import plain_or_gzipped
from headrank.formats import Collection, iterate_corpus, read_query_ids
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import ITEM_BYTES, POOLS

if TYPE_CHECKING:
    from headrank.reranking.late_reader import LateReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank index`."""
    group = parser.add_argument_group("store")
    group.add_argument("--store", metavar="DIR", required=True, help="the store's folder; made if it is not there")
    group.add_argument(
        "--collection",
        metavar="DIR",
        action="append",
        default=[],
        help="a folder with corpus.jsonl[.gz]; may be repeated",
    )
    group.add_argument(
        "--corpus", metavar="FILE", action="append", default=[], help="a corpus.jsonl[.gz]; may be repeated"
    )
    group.add_argument(
        "--depth",
        type=options.positive_int,
        metavar="N",
        help="only the first N candidates of each query in a collection's run",
    )
    group.add_argument("--only", metavar="FILE", help="with --depth: only candidates of the query ids in this file")
    group.add_argument(
        "--from",
        dest="source",
        metavar="DIR",
        help="convert another store (bf16 or fp32, not pooled) instead of computing: all of its pairs, or those of "
        "--pairs or --heads",
    )
    group.add_argument(
        "--dtype", choices=tuple(ITEM_BYTES), help="numbers of a new store (default int8: a quarter of fp32)"
    )
    group.add_argument(
        "--pool", type=int, choices=POOLS, help="neighbouring tokens that share one key in a new store (default 1)"
    )
    group.add_argument(
        "--pairs",
        metavar="P",
        help="'heads': those of the readout (default); 'all' down to its last layer; or 3:0,7:2,...",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="M", default="embedded", help="'embedded' (default), a Hugging Face directory or hub name"
    )
    group.add_argument(
        "--heads",
        metavar="FILE",
        help="heads.json with a readout of the late layout (default: the model's headrank.json)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: cuda where there is one)")
    options.add_threads_argument(group)
    group.add_argument(
        "--compute-dtype",
        choices=options.DTYPES,
        help="of the model's forward (default: auto; float32 for an fp32 store)",
    )
    group.add_argument(
        "--batch-tokens",
        type=options.positive_int,
        metavar="N",
        help="tokens of a batch (default: 192 on a CPU, 16384)",
    )
    options.add_ray_arguments(parser)
    group = parser.add_argument_group("looking after a store")
    group.add_argument("--info", action="store_true", help="say what the store holds, and do nothing else")
    group.add_argument(
        "--verify",
        action="store_true",
        help="read every record and key and compare checksums; exit code 1 if any is damaged",
    )
    group.add_argument(
        "--prune",
        action="store_true",
        help="drop damaged and repeated passages; with --collection also those that are not in it any more",
    )


def run(args: argparse.Namespace) -> int:
    """Index, or look after a store."""
    options.check_ray_arguments(args)
    if args.info + args.verify + args.prune > 1:
        raise InputError("--info, --verify and --prune are three jobs; give one of them")
    folder = Path(args.store)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--store {folder}: is a file; a store is a folder")
    if args.info:
        return _info(folder)
    if args.verify:
        return _verify(folder)
    corpora = _corpora(args)
    if args.source and (corpora or args.prune):
        raise InputError("--from converts a whole store; leave out --collection, --corpus and --prune")
    if args.source:
        return _convert(args, folder)
    if args.prune:
        return _prune(folder, corpora)
    if not corpora:
        raise InputError("nothing to index; give --collection DIR, --corpus FILE or --from STORE")
    return _index(args, folder, corpora)


@dataclass(frozen=True)
class _Corpus:
    """A corpus file, and the ids that are wanted of it; None is all."""

    path: Path
    wanted: frozenset[str] | None = None

    def passages(self) -> Iterator[tuple[str, str]]:
        """(title, text) of what is wanted, in the file's order."""
        for document in iterate_corpus(self.path):
            if self.wanted is None or document.doc_id in self.wanted:
                yield document.title, document.text


def _corpora(args: argparse.Namespace) -> list[_Corpus]:
    if (args.depth or args.only) and (args.corpus or not (args.collection and args.depth)):
        raise InputError(
            "--depth takes the candidates of a collection's run, and --only goes with it; give --collection DIR, no "
            "--corpus"
        )
    only = read_query_ids(args.only) if args.only else None
    found = [_Corpus(Path(path)) for path in args.corpus]
    for name in args.collection:
        path = plain_or_gzipped(name, "corpus.jsonl")
        if not path.is_file():
            raise InputError(
                f"{name}: no corpus.jsonl (or corpus.jsonl.gz) there; give --collection DIR or --corpus FILE"
            )
        found.append(_Corpus(path, _candidates(name, args.depth, only) if args.depth else None))
    return found


def _candidates(collection: str, depth: int, only: set[str] | None) -> frozenset[str]:
    run = Collection.open(collection).run()
    return frozenset(row.doc_id for query, rows in run.items() if only is None or query in only for row in rows[:depth])


def _passages(corpora: list[_Corpus]) -> Iterator[tuple[str, str]]:
    for corpus in corpora:
        yield from corpus.passages()


def _index(args: argparse.Namespace, folder: Path, corpora: list[_Corpus]) -> int:
    from headrank.passage_store.indexing import IndexSettings, index_corpus

    logging.getLogger("headrank.passage_store").setLevel(logging.INFO)  # the estimate is for everybody
    elsewhere = None
    if args.ray is not None:
        from headrank.integrations.ray_data import whole_path
        from headrank.integrations.ray_index import keys_from_ray

        there = argparse.Namespace(**{**vars(args), "model": whole_path(args.model), "heads": whole_path(args.heads)})
        elsewhere = keys_from_ray(
            functools.partial(_late_reader_on, there), args.device, args.ray or None, args.ray_workers
        )
    late = _late_reader(args)

    def progress(passages: Iterable[Any], total: int) -> Iterable[Any]:
        return options.progress(passages, total=total, description="index", unit="passage")

    settings = IndexSettings(args.dtype, args.pool)
    done = index_corpus(folder, late, lambda: _passages(corpora), settings, progress=progress, elsewhere=elsewhere)
    if "present" in done:  # the first process speaks
        share = " (this process's share)" if done.get("processes", 1) > 1 else ""
        print(
            f"{folder}: {done['added']:,} passages added{share}, {done['present']:,} were there; "
            f"{done['seconds']:.1f} s"
        )
        if done["saturated"]:
            print(f"{folder}: {done['saturated']:,} numbers did not fit the int8 scales and were cut; see --info")
    return 0


def _convert(args: argparse.Namespace, folder: Path) -> int:
    from headrank.passage_store.conversion import convert
    from headrank.passage_store.indexing import index_pairs
    from headrank.passage_store.store import PassageStore

    source, pairs = PassageStore(args.source), None
    if args.heads or (args.pairs or "all") != "all":
        from headrank.method.late_layout import key_pairs
        from headrank.model_config import load_config, text_config
        from headrank.reranking.model_sources import base_of
        from headrank.reranking.reranker import choose_heads
        from headrank.reranking.shipped_readouts import model_to_read

        model = model_to_read(args.model, args.heads)
        config, heads = text_config(load_config(base_of(model))), choose_heads(model, args.heads)
        num_groups = int(getattr(config, "num_key_value_heads", None) or heads.num_heads)
        readout_pairs = key_pairs(heads.heads, heads.num_heads // num_groups)[0]
        pairs = index_pairs(args.pairs or "heads", readout_pairs, num_groups, heads.num_layers)

    def progress(passages: Any, total: int) -> Any:
        return options.progress(passages, total=total, description="convert", unit="passage")

    done = convert(source, folder, pairs, args.dtype or "int8", args.pool or 1, progress)
    print(
        f"{folder}: {done['added']:,} passages converted, {done['present']:,} were there; {done['saturated']:,} "
        "numbers were cut"
    )
    return 0


def _late_reader_on(args: argparse.Namespace, device: str) -> LateReader:
    """The reader in a process of a Ray cluster."""
    return _late_reader(argparse.Namespace(**{**vars(args), "device": device}))


def _late_reader(args: argparse.Namespace) -> LateReader:
    from headrank.passage_store.indexing import index_pairs
    from headrank.reranking.late_reader import LateReader, heads_of_pairs
    from headrank.reranking.reader import AttentionReader
    from headrank.reranking.reranker import choose_heads
    from headrank.reranking.shipped_readouts import model_to_read

    model = model_to_read(args.model, args.heads)
    heads = choose_heads(model, args.heads)
    if not heads.prompt.is_late:
        raise InputError(
            f"these heads read the {heads.prompt.document_layout} layout, and keys can be kept in the late one only"
        )
    dtype = args.compute_dtype or ("float32" if args.dtype == "fp32" else "auto")
    asked = args.pairs or "heads"
    depth = heads.num_layers - 1 if ":" in asked else heads.l_max
    reader = AttentionReader.load(model, prompt=heads.prompt, last_layer=depth, device=args.device, dtype=dtype)
    late = LateReader(reader, heads, args.batch_tokens)
    pairs = index_pairs(asked, late.pairs, late.num_groups, heads.num_layers)
    if pairs == late.pairs:
        return late
    return LateReader(reader, heads_of_pairs(heads, pairs, late.num_groups), args.batch_tokens)


def _info(folder: Path) -> int:
    from headrank.passage_store.store import PassageStore

    store = PassageStore(folder)
    header, counts = store.header, store.summary()
    identity = header.identity
    share = counts["saturated"] / max(1, counts["numbers"])
    lines = {
        "model": f"{identity.model} (weights {identity.weights}, adapter {identity.adapter}, tokenizer "
        f"{identity.tokenizer})",
        "prompt": ", ".join(f"{name} {value!r}" for name, value in identity.prompt.items()),
        "pairs": f"{len(header.pairs)}: " + ", ".join(f"{layer}:{group}" for layer, group in header.pairs),
        "numbers": f"{header.dtype}, pool {header.pool}, {header.bytes_per_token:,.0f} bytes per token; computed in "
        f"{header.computed_in}",
        "passages": f"{counts['passages']:,} of {counts['tokens']:,} tokens ({counts['shortened']:,} passages "
        "shortened)",
        "size": f"{counts['key_bytes'] / 1e6:,.1f} MB of keys, {counts['index_bytes'] / 1e6:,.1f} MB of records and "
        "index",
        "saturated": f"{counts['saturated']:,} numbers ({share:.2g} of all)"
        if header.dtype == "int8"
        else "none (no int8)",
        "segments": f"{counts['segments']:,}"
        + (
            f", {counts['unsealed']} not sealed (being written, or its writer was killed)" if counts["unsealed"] else ""
        ),
    }
    width = max(map(len, lines))
    print(f"{folder}")
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items()))
    return 0


def _verify(folder: Path) -> int:
    from headrank.passage_store.upkeep import verify

    count, damage = verify(folder)
    for found in damage[:20]:
        print(f"{found.place}: {found.what}")
    if damage:
        more = f" ({len(damage) - 20:,} more)" if len(damage) > 20 else ""
        print(
            f"{folder}: {len(damage):,} things are damaged{more}, {count:,} passages are whole; 'headrank index "
            "--prune' keeps these"
        )
        return 1
    print(f"{folder}: {count:,} passages, all whole")
    return 0


def _prune(folder: Path, corpora: list[_Corpus]) -> int:
    from headrank.passage_store.header import StoreHeader
    from headrank.passage_store.upkeep import prune
    from headrank.passage_store.writer import writing

    StoreHeader.read(folder)  # a folder that is no store gets no lock file
    wanted = {passage_digest(document) for document in _passages(corpora)} if corpora else None
    with writing(folder):
        kept, dropped = prune(folder, wanted)
    print(f"{folder}: {kept:,} passages kept, {dropped:,} dropped")
    return 0
