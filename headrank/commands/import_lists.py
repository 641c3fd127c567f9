"""Public training sets in their own formats -> a collection with its labels, for 'headrank pairs' and 'headrank label'.

Takes BGE's JSONL (query, pos, neg, and pos_scores, neg_scores where a teacher made them), Tevatron's, which is also
RLHN's (query_id, query, positive_passages, negative_passages), and MS MARCO triples of texts, or of ids with --queries
and --passages; all plain or gzipped. The file says which it is. Passages are stored once, on disk, so that memory does
not grow with them. --output appears whole or not at all. Scores become --output/labels, for 'headrank pairs --labels'.

  headrank import-lists rlhn.jsonl --output rlhn --queries-per-part 20000 --max-negatives 15
  headrank pairs --collection rlhn/rlhn-0000 --collection rlhn/rlhn-0001 --output train
  headrank import-lists qidpidtriples.train.tsv.gz --queries queries.train.tsv --passages collection.tsv \\
      --max-negatives 20 --output marco
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrank.commands.options import positive_int, progress, seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="JSONL or triples, plain or .gz; several become one collection"
    )
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="the collection's folder; its name becomes part of context ids"
    )
    parser.add_argument("--queries", metavar="FILE", help="of id triples: id, tab, text")
    parser.add_argument(
        "--passages", metavar="FILE", help="of id triples: id, tab, text (collection.tsv), or a corpus.jsonl"
    )
    parser.add_argument(
        "--max-negatives", type=positive_int, default=0, metavar="N", help="keep at most N negatives per query"
    )
    parser.add_argument(
        "--max-queries", type=positive_int, default=0, metavar="N", help="keep a random sample of N queries"
    )
    parser.add_argument(
        "--queries-per-part",
        type=positive_int,
        default=0,
        metavar="N",
        help="write collections DIR/NAME-0000, ... of N queries each: 'headrank pairs' holds one at a time in memory",
    )
    parser.add_argument(
        "--ids-from-text",
        action="store_true",
        help="name queries and passages by their content, where ids of a file contradict each other",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of the samples and of the order of each list (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Import and say what was found."""
    from data_tools.import_lists import LABELS_FOLDER, ImportSettings, import_lists

    settings = ImportSettings(
        args.max_negatives, args.max_queries, args.queries_per_part, args.ids_from_text, args.seed
    )
    counts = import_lists(
        args.files, Path(args.output), settings, queries=args.queries, passages=args.passages, watch=_watch
    )
    print(
        f"{args.output}: {counts.queries:,} queries in {counts.folders} collection{'s' * (counts.folders > 1)}, "
        f"{counts.good:,} good and {counts.bad:,} bad candidates, {counts.passages:,} passages"
    )
    if counts.left_out:
        print(f"{counts.left_out:,} queries without a good or without a bad passage were left out")
    if counts.scored:
        print(f"{counts.scored:,} scores of a teacher: headrank pairs --labels {Path(args.output) / LABELS_FOLDER}")
    return 0


def _watch(items: Iterable[Any], what: str) -> Iterator[Any]:
    return progress(items, description=what, unit="line")
