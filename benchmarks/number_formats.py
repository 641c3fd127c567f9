"""What number formats cost in quality: `python -m benchmarks.number_formats --stores DIR --collection DIR ...`.

The embedded model with its shipped readouts reranks the first --depth candidates of each collection, cut to --words
words, in every number format of the model's weights, and from an int8 passage store. Each format computes every passage
once, into a store of its own in fp32 with all pairs, from which both readouts are scored; fp32 scores from it are those
without a store. The row "int8 store" reads keys that float32 weights made and the store rounded; "int8 store, int8
query" is the fastest way to serve.

Prints NDCG@10 and, against float32, the difference with its 95% interval over queries. --stores is kept and gone on
with; give a new folder for another adapter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrank.evaluation.measures import evaluate_run
from headrank.evaluation.significance import bootstrap_interval
from headrank.formats import Candidate, Collection
from headrank.passage_store.conversion import convert
from headrank.passage_store.indexing import IndexSettings, index_corpus, index_pairs
from headrank.passage_store.store import PassageStore
from headrank.reranking.late_reader import LateReader, heads_of_pairs
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from headrank.reranking.shipped_readouts import model_to_read, shipped_readout
from headrank.selection.readout_lists import ReadoutList, collection_lists

EXACT, MEASURE = "float32", "nDCG@10"
# row -> (weights, store): the exact store of that format's own keys, or float32's keys rounded to int8
ROWS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "int8"),
    "int8 store": ("float32", "rounded"),
    "int8 store, int8 query": ("int8", "rounded"),
}


def fill(folder: Path, dtype: str, lists: Sequence[ReadoutList], words: int) -> None:
    """The keys of all passages as weights in ``dtype`` make them, kept in fp32; those of float32 also rounded to
    int8.
    """
    heads = shipped_readout("full", "embedded")
    heads = dataclasses.replace(heads, prompt=dataclasses.replace(heads.prompt, max_words=words))
    reader = AttentionReader.load(
        model_to_read("embedded", "full"), prompt=heads.prompt, last_layer=heads.l_max, dtype=dtype
    )
    late = LateReader(reader, heads)
    pairs = index_pairs("all", late.pairs, late.num_groups, heads.num_layers)
    late = LateReader(reader, heads_of_pairs(heads, pairs, late.num_groups))
    corpus = [document for one in lists for document in one.documents]
    index_corpus(folder / dtype, late, lambda: corpus, IndexSettings("fp32"))
    if dtype == EXACT:
        convert(PassageStore(folder / EXACT), folder / "rounded", None, "int8", 1)


def qualities(folder: Path, row: str, readout: str, lists: Sequence[ReadoutList], words: int) -> dict[str, float]:
    """NDCG@10 of every query."""
    dtype, store = ROWS[row]
    heads = shipped_readout(readout, "embedded")
    prompt = dataclasses.replace(heads.prompt, max_words=words)
    reranker = HeadRankReranker.from_pretrained("embedded", readout, prompt=prompt, dtype=dtype, store=folder / store)
    found = reranker.score_batch(
        [(one.query, [{"title": title, "text": text} for title, text in one.documents]) for one in lists]
    )
    values = {}
    for one, result in zip(lists, found, strict=True):
        rows = [Candidate(doc_id, 0, float(score)) for doc_id, score in zip(one.doc_ids, result.scores, strict=True)]
        values[one.key] = evaluate_run({one.query_id: rows}, {one.query_id: dict(one.judged)}, [MEASURE]).mean(MEASURE)
    return values


def table(values: dict[str, dict[str, float]], collections: Iterable[str]) -> list[dict[str, Any]]:
    """A row for every format and collection: NDCG@10 and its difference from float32, times 100."""
    rows = []
    for name, by_query in values.items():
        for collection in collections:
            keys = [key for key in by_query if key.rpartition("/")[0] == collection]
            here = [100 * by_query[key] for key in keys]
            differences = [100 * (by_query[key] - values[EXACT][key]) for key in keys]
            low, high = bootstrap_interval(differences)
            mean, change = (sum(numbers) / len(keys) for numbers in (here, differences))
            rows.append(
                {
                    "row": name,
                    "collection": collection,
                    "queries": len(keys),
                    "ndcg": mean,
                    "change": change,
                    "interval": [low, high],
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Compute what is missing, print the table, --json FILE keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", action="append", required=True, metavar="DIR")
    parser.add_argument(
        "--stores", type=Path, required=True, metavar="DIR", help="keys computed so far; 15 KB per token and format"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=(EXACT, "bfloat16", "int8"), default=[EXACT, "bfloat16", "int8"]
    )
    parser.add_argument("--readout", nargs="+", choices=("full", "fast"), default=["full", "fast"])
    parser.add_argument("--depth", type=int, default=20, metavar="N")
    parser.add_argument("--words", type=int, default=64, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    lists = [one for folder in args.collection for one in collection_lists(Collection.open(folder), depth=args.depth)]
    for dtype in dict.fromkeys([EXACT, *args.formats]):
        fill(args.stores, dtype, lists, args.words)
    results = {}
    for readout in args.readout:
        rows = [row for row, (dtype, _) in ROWS.items() if dtype in (EXACT, *args.formats)]
        values = {row: qualities(args.stores, row, readout, lists, args.words) for row in rows}
        results[readout] = table(values, dict.fromkeys(one.collection for one in lists))
        for found in results[readout]:
            low, high = found["interval"]
            print(
                f"{readout:>5} {found['row']:<23} {found['collection']:<10} {found['queries']:>4} queries, NDCG@10 "
                f"{found['ndcg']:.2f}, "
                f"against float32 {found['change']:+.2f} [{low:+.2f}, {high:+.2f}]"
            )
    if args.json:
        args.json.write_text(
            json.dumps({"depth": args.depth, "words": args.words, "readouts": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
