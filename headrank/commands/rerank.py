"""Rerank the first-stage candidates of a collection: TREC run (or rank_llm JSONL) in, the same out.

One truncated prefill per query. An interrupted run goes on where it stopped: finished queries are kept in
OUTPUT.partial*.jsonl until the run is complete. On several GPUs or processes: torchrun --nproc-per-node N -m headrank
rerank ..., or --ray.
"""

from __future__ import annotations

import argparse
import sys

from headrank.commands import options
from headrank.reranking.rerank_job import RerankJob, rerank
from headrank.reranking.rerank_outputs import Target

_INPUTS = ("model", "collection", "queries", "corpus", "run", "requests", "only")
_SWITCHES = (
    "depth",
    "shuffle",
    "device",
    "dtype",
    "batch_size",
    "api_base",
    "restart",
    "store",
    "store_add",
    "key_cache_mb",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank rerank`."""
    options.add_collection_arguments(parser)
    parser.add_argument(
        "--requests",
        metavar="FILE",
        help="rank_llm request JSONL (query, candidates with text) instead of a collection; with --ray also Parquet "
        "or a folder",
    )
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser)
    group = parser.add_argument_group("reranking")
    group.add_argument(
        "--output",
        metavar="FILE",
        required=True,
        help="TREC run to write; a name ending in .jsonl gives rank_llm JSONL",
    )
    group.add_argument(
        "--method",
        default="headrank",
        help="headrank (default), icr, core, qr, niah, rankgpt; bm25 or colbertv2: the run as it is",
    )
    group.add_argument(
        "--heads",
        metavar="FILE",
        help="heads.json, or 'all'; for the embedded model 'fast' or 'full' (default: the model's own; icr needs none)",
    )
    group.add_argument(
        "--depth", type=options.positive_int, default=40, metavar="N", help="candidates reranked per query (default 40)"
    )
    group.add_argument(
        "--batch-size",
        type=options.positive_int,
        metavar="B",
        help="queries per forward (default 1; the paper uses 16 on GPUs); of a late readout: queries whose passages "
        "share batches (32)",
    )
    group.add_argument(
        "--no-calibration", action="store_true", help="rank by raw attention mass (log masses are never calibrated)"
    )
    group.add_argument(
        "--shuffle", type=int, metavar="SEED", help="shuffle each candidate list before prompting: shows position bias"
    )
    group.add_argument("--only", metavar="FILE", help="rerank only the query ids in this file")
    group.add_argument(
        "--scores",
        metavar="FILE",
        help="also write per-document scores as JSON lines, for the analyses of 'headrank report'",
    )
    group.add_argument("--meta", metavar="FILE", help="also write seconds, tokens, heads and versions as JSON")
    group.add_argument("--tag", default=None, help="run tag (default: the method's name)")
    group.add_argument("--restart", action="store_true", help="forget an interrupted run and begin anew")
    options.add_store_arguments(group)
    options.add_ray_arguments(parser)
    parser.add_argument(
        "--api-base", metavar="URL", help="rankgpt: an OpenAI-compatible endpoint instead of a local model"
    )


def run(args: argparse.Namespace) -> int:
    """Rerank and write; returns the exit code."""
    options.check_ray_arguments(args)
    job = job_from(args)
    if args.ray is None:
        rerank(job)
    else:
        from headrank.integrations.ray_rerank import rerank_on_ray

        rerank_on_ray(job, args.ray or None, args.ray_workers)
    return 0


def job_from(args: argparse.Namespace) -> RerankJob:
    """The job that the flags describe."""
    same = {name: getattr(args, name) for name in _INPUTS + _SWITCHES}
    target = Target(args.method, args.output, args.heads, args.scores, args.meta, args.tag)
    prompt = options.prompt_changes(args)
    return RerankJob(
        **same, targets=(target,), prompt=prompt, calibrate=not args.no_calibration, command=tuple(sys.argv[1:])
    )
