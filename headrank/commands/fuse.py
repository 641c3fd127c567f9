"""Put a reranked run and its first stage together: a weighted sum of their scores, standardised within every list.

  headrank fuse reranked.txt --collection DIR --depth 20 --output fused.txt
  headrank fuse reranked.txt --first-stage run.bm25.txt --depth 40 --weight 0.7 --output fused.txt

No model is read. --depth must be that of the reranking: what lies below keeps its place. Term matching and attention
fail on different queries, so that two good rankings are often better together; a first stage that is much worse than
the reranker harms it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import plain_or_gzipped, require_writable
from headrank.formats import read_run, write_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank fuse`."""
    parser.add_argument("run", metavar="RUN", help="the reranked TREC run, as 'headrank rerank' writes it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--collection", metavar="DIR", help="take the first stage from this collection's run.bm25.txt")
    source.add_argument("--first-stage", metavar="FILE", help="the TREC run that was reranked")
    parser.add_argument(
        "--depth", type=options.positive_int, required=True, metavar="N", help="candidates that were reranked"
    )
    parser.add_argument(
        "--weight",
        type=float,
        default=0.5,
        metavar="W",
        help="of the reranker, from 0 to 1; the first stage has the rest (default 0.5)",
    )
    parser.add_argument("--output", metavar="FILE", required=True, help="TREC run to write")
    parser.add_argument("--tag", metavar="WORD", default="fused", help="last column of the run (default fused)")


def run(args: argparse.Namespace) -> int:
    """Fuse and write; returns the exit code."""
    from headrank.reranking.fusion import fuse_runs

    if not 0 <= args.weight <= 1:
        raise InputError(f"--weight {args.weight} must be from 0 to 1")
    if args.tag.split() != [args.tag]:
        raise InputError(f"--tag {args.tag!r} must be one word; a TREC run has six columns")
    if args.output.endswith(".jsonl"):
        raise InputError(
            f"--output {args.output}: 'fuse' has no texts and writes TREC runs only; give a name with another ending"
        )
    source = Path(args.first_stage) if args.first_stage else plain_or_gzipped(args.collection, "run.bm25.txt")
    require_writable(args.output, reads=[args.run, source])
    first_stage, reranked = read_run(source), read_run(args.run)
    try:
        fused = fuse_runs(first_stage, reranked, args.depth, args.weight)
    except InputError as error:
        raise InputError(f"{args.run} and {source}: {error}") from None
    write_run(args.output, fused, args.tag)
    print(
        f"{args.output}: {len(fused)} queries, {args.weight:g} x {args.run} + {1 - args.weight:g} x first stage",
        file=sys.stderr,
    )
    return 0
