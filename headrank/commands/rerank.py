"""Rerank the first-stage candidates of a collection: TREC run (or rank_llm JSONL) in, the same out.

One truncated prefill a query. An interrupted run goes on where it stopped: finished queries are kept in OUTPUT.partial*.jsonl
until the run is complete. On several GPUs or processes: torchrun --nproc-per-node N -m headrank rerank ...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrank.commands import options
from headrank.commands.rerank_targets import Target, require_places, targets_of, write_targets
from headrank.errors import InputError
from headrank.files import folder_key
from headrank.method.prompt import PromptTemplate
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.partial_results import PartialResults
from headrank.reranking.rerank_requests import Request, requests_from_collection, requests_from_file

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank rerank`."""
    options.add_collection_arguments(parser)
    parser.add_argument("--requests", metavar="FILE", help="rank_llm request JSONL (query, candidates with text) instead of a collection")
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser)
    group = parser.add_argument_group("reranking")
    group.add_argument("--output", metavar="FILE", required=True, help="TREC run to write; a name ending in .jsonl gives rank_llm JSONL")
    group.add_argument(
        "--method", default="headrank", help="headrank (default), icr, core, qr, niah, rankgpt; bm25 or colbertv2: the run as it is"
    )
    group.add_argument("--heads", metavar="FILE", help="heads.json, or 'all' (default: the model's headrank.json; icr needs none)")
    group.add_argument("--depth", type=options.positive_int, default=40, metavar="N", help="candidates reranked per query (default 40)")
    group.add_argument(
        "--batch-size", type=options.positive_int, default=1, metavar="B", help="queries per forward (default 1; the paper uses 16 on GPUs)"
    )
    group.add_argument("--no-calibration", action="store_true", help="rank by raw attention mass")
    group.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle each candidate list before prompting: shows position bias")
    group.add_argument("--only", metavar="FILE", help="rerank only the query ids in this file")
    group.add_argument(
        "--scores", metavar="FILE", help="also write per-document scores as JSON lines, for the analyses of 'headrank report'"
    )
    group.add_argument("--meta", metavar="FILE", help="also write seconds, tokens, heads and versions as JSON")
    group.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="DIR=METHOD[:HEADS]",
        help="another method on the same model, read off the same forward; run.txt, scores.jsonl and meta.json go to DIR; may be repeated",
    )
    group.add_argument("--tag", default=None, help="run tag (default: the method's name)")
    group.add_argument("--restart", action="store_true", help="forget an interrupted run and begin anew")
    parser.add_argument("--api-base", metavar="URL", help="rankgpt: an OpenAI-compatible endpoint instead of a local model")


def run(args: argparse.Namespace) -> int:
    """Rerank and write; returns the exit code."""
    targets = targets_of(args)
    rank, world_size = _world()
    requests = _requests(args)
    if rank == 0:
        require_places(targets, reads=[args.requests, args.only, *([] if args.requests else options.open_collection(args).paths)])
    key = _fingerprint(args, targets, requests)
    store = PartialResults(Path(args.output), key, rank, restart=args.restart)
    _barrier(world_size)  # all see the same finished queries, or the shares below would not fit together
    pending = [request for request in requests if request.query_id not in store.done][rank::world_size]
    if store.done:
        _log.info("%s: %d of %d queries were done before, going on", args.output, len(store.done), len(requests))
    started = time.perf_counter()
    rankers = _build_rankers(args, targets) if pending or (rank == 0 and any(target.meta for target in targets)) else []
    loaded = time.perf_counter()
    bar = options.progress(pending, total=len(pending), description="rerank", unit="query")
    with contextlib.closing(bar):  # an error has its line to itself
        for batch in _batches(bar if rank == 0 else pending, args.batch_size):
            store.add(_score(rankers, batch))
    store.close()
    _barrier(world_size)
    if rank == 0:
        facts = {"load_seconds": loaded - started, "rank_seconds": time.perf_counter() - loaded, "processes": world_size}
        finished = PartialResults(Path(args.output), key, rank)
        write_targets(args, targets, requests, finished.done, rankers, facts)
        finished.discard()
    _barrier(world_size, last=True)
    return 0


def _score(rankers: Sequence[Any], batch: list[Request]) -> Iterator[dict[str, Any]]:
    """One result line per query of a batch; the time of a batch is shared evenly."""
    started = time.perf_counter()
    lists = [(request.query, [{"title": d.title, "text": d.text} for d in request.documents]) for request in batch]
    results = [[result] for result in rankers[0].score_batch(lists)] if len(rankers) == 1 else _shared_scores(rankers, lists)
    seconds = (time.perf_counter() - started) / len(batch)
    for request, (result, *others) in zip(batch, results, strict=True):
        by_rank = sorted(range(len(request.candidates)), key=lambda place: request.candidates[place].rank)
        positions = result.positions or range(1, len(by_rank) + 1)
        yield (
            {
                "query_id": request.query_id,
                "doc_ids": [request.candidates[place].doc_id for place in by_rank],
                "scores": [float(result.scores[place]) for place in by_rank],
                "ranks": [request.candidates[place].rank for place in by_rank],
                "positions": [positions[place] for place in by_rank],
                "seconds": round(seconds, 6),
                "tokens": result.num_tokens,
                "is_shortened": bool(result.is_shortened),
            }
            | _format_kept(result)
            | ({"also": [[float(other.scores[place]) for place in by_rank] for other in others]} if others else {})
        )


def _shared_scores(rankers: Sequence[Any], lists: list[tuple[str, list[dict[str, str]]]]) -> list[list[Any]]:
    from headrank.reranking.reranker import shared_scores

    return shared_scores(rankers, lists)


def _format_kept(result: Any) -> dict[str, Any]:
    """For generated rankings: [identifiers recovered, identifiers expected, strict] of every window."""
    answers = getattr(result, "answers", None)
    if answers is None:
        return {}
    return {"windows": [[answer.num_recovered, len(answer.order), answer.is_strict] for answer in answers]}


def _requests(args: argparse.Namespace) -> list[Request]:
    """The work that the flags name; a selection that leaves nothing is an error."""
    only = options.read_id_list(args.only) if args.only else None
    if args.requests is not None:
        if args.collection or args.queries or args.corpus or args.run:
            raise InputError(
                "--requests brings its own queries, candidates and texts; leave out --collection, --queries, --corpus and --run"
            )
        requests = requests_from_file(args.requests, depth=args.depth, shuffle=args.shuffle, only=only)
    else:
        requests = requests_from_collection(options.open_collection(args), depth=args.depth, shuffle=args.shuffle, only=only)
    if not requests:
        raise InputError("no query with candidates is left to rerank; check --only and the run")
    return requests


def _batches(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    left = iter(requests)
    while batch := list(itertools.islice(left, size)):
        yield batch


def _build_rankers(args: argparse.Namespace, targets: Sequence[Target]) -> list[Any]:
    """The ranker of every target; several read one model, loaded as deep as the deepest of them needs."""
    if len(targets) == 1:
        return [_build_ranker(args)]
    from headrank.reranking.reader import AttentionReader
    from headrank.reranking.reranker import HeadRankReranker, choose_heads

    model = resolve_model(args.model)
    sets = [choose_heads(model, "all" if target.method == "icr" else target.heads) for target in targets]
    prompts = [options.prompt_from(args, heads.prompt) for heads in sets]
    for target, prompt in zip(targets[1:], prompts[1:], strict=True):
        if prompt.hash != prompts[0].hash:
            raise InputError(
                f"--also: {targets[0].method} and {target.method} have different prompts ({_difference(prompts[0], prompt)}; icr has the "
                "default one), and one forward has one: give the flag, or rerank them separately"
            )
    reader = AttentionReader.load(
        model, prompt=prompts[0], last_layer=max(heads.l_max for heads in sets), device=args.device, dtype=args.dtype
    )
    return [HeadRankReranker(reader, heads, calibrate=not args.no_calibration, batch_size=args.batch_size) for heads in sets]


def _difference(one: PromptTemplate, other: PromptTemplate) -> str:
    """The first field in which two prompts differ, with both values."""
    name = next(field.name for field in dataclasses.fields(one) if getattr(one, field.name) != getattr(other, field.name))
    return f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"


def _build_ranker(args: argparse.Namespace) -> Any:
    """The method's ranker; --heads and the prompt switches reach every attention method alike. A first stage needs no model."""
    from headrank.methods import FirstStage, build_ranker, find_method

    if find_method(args.method).kind == "first-stage":
        return FirstStage()
    from headrank.reranking.reranker import choose_heads

    model = resolve_model(args.model)
    heads = choose_heads(model, args.heads) if args.heads or args.method == "headrank" else None
    return build_ranker(
        args.method,
        model,
        heads=heads,
        device=args.device,
        dtype=args.dtype,
        prompt=options.prompt_from(args, heads.prompt if heads else None) if options.changes_prompt(args) else None,
        calibrate=not args.no_calibration,
        batch_size=args.batch_size,
        api_base=args.api_base,
    )


def _fingerprint(args: argparse.Namespace, targets: Sequence[Target], requests: list[Request]) -> str:
    """A key of everything that decides the result, so that a changed command never continues another's work."""
    digest = hashlib.sha256()
    settings = {
        name: value
        for name, value in sorted(vars(args).items())
        if name not in ("output", "scores", "meta", "restart", "tag", "batch_size") and (name != "document_layout" or value is not None)
    }
    digest.update(json.dumps(settings, default=str).encode())
    for path in [Path(target.heads) for target in targets if target.heads]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    digest.update(str(folder_key(args.model)).encode())
    for request in requests:
        digest.update(f"{request.query_id}\t{request.query}\t{[c.doc_id for c in request.candidates]}".encode())
        for document in request.documents:
            digest.update(f"{document.title}\t{document.text}\n".encode())
    return digest.hexdigest()[:16]


def _world() -> tuple[int, int]:
    """(rank, world size) under torchrun, else (0, 1)."""
    rank, world_size = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    if world_size > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
    return rank, world_size


def _barrier(world_size: int, last: bool = False) -> None:
    """Wait for every process; the last barrier also says goodbye."""
    if world_size > 1:
        import torch.distributed as dist

        dist.barrier()
        if last:
            dist.destroy_process_group()
