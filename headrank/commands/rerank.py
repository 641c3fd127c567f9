"""Rerank the first-stage candidates of a collection: TREC run (or rank_llm JSONL) in, the same out.

One truncated prefill a query. An interrupted run goes on where it stopped: finished queries are kept in OUTPUT.partial*.jsonl
until the run is complete. On several GPUs or processes: torchrun --nproc-per-node N -m headrank rerank ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import write_json, write_jsonl
from headrank.formats import write_run
from headrank.partial_results import PartialResults
from headrank.requests import Request, requests_from_collection, requests_from_file

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank rerank`."""
    options.add_collection_arguments(parser)
    parser.add_argument("--requests", metavar="FILE", help="rank_llm request JSONL (query, candidates with text) instead of a collection")
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser)
    group = parser.add_argument_group("reranking")
    group.add_argument("--output", metavar="FILE", required=True, help="TREC run to write; a name ending in .jsonl gives rank_llm JSONL")
    group.add_argument("--method", default="headrank", help="headrank (default), icr, core, qr, niah, rankgpt or bm25")
    group.add_argument("--heads", metavar="FILE", help="heads.json (default: the model's headrank.json; icr needs none)")
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
    group.add_argument("--tag", default=None, help="run tag (default: the method's name)")
    group.add_argument("--restart", action="store_true", help="forget an interrupted run and begin anew")
    parser.add_argument("--api-base", metavar="URL", help="rankgpt: an OpenAI-compatible endpoint instead of a local model")


def run(args: argparse.Namespace) -> int:
    """Rerank and write; returns the exit code."""
    rank, world_size = _world()
    requests = _requests(args)
    key = _fingerprint(args, requests)
    store = PartialResults(Path(args.output), key, rank, restart=args.restart)
    pending = [request for request in requests if request.query_id not in store.done][rank::world_size]
    if store.done:
        _log.info("%s: %d of %d queries were done before, going on", args.output, len(store.done), len(requests))
    started = time.perf_counter()
    ranker = _build_ranker(args) if pending or (args.meta and rank == 0) else None
    loaded = time.perf_counter()
    bar = options.progress(
        _batches(pending, args.batch_size), total=-(-len(pending) // args.batch_size), description="rerank", unit="batch"
    )
    for batch in bar if rank == 0 else _batches(pending, args.batch_size):
        store.add(_score(ranker, batch))
    store.close()
    _barrier(world_size)
    if rank == 0:
        facts = {"load_seconds": loaded - started, "rank_seconds": time.perf_counter() - loaded, "processes": world_size}
        _write_outputs(args, requests, PartialResults(Path(args.output), key, rank), ranker, facts)
    _barrier(world_size, last=True)
    return 0


def _score(ranker: Any, batch: list[Request]) -> Iterator[dict[str, Any]]:
    """One result line per query of a batch; the time of a batch is shared evenly."""
    started = time.perf_counter()
    lists = ranker.score_lists([(request.query, [{"title": d.title, "text": d.text} for d in request.documents]) for request in batch])
    seconds = (time.perf_counter() - started) / len(batch)
    for request, result in zip(batch, lists, strict=True):
        by_rank = sorted(
            zip(request.candidates, result.scores, _positions(ranker, len(request.candidates)), strict=True), key=lambda row: row[0].rank
        )
        yield {
            "query_id": request.query_id,
            "doc_ids": [candidate.doc_id for candidate, _, _ in by_rank],
            "scores": [float(score) for _, score, _ in by_rank],
            "ranks": [candidate.rank for candidate, _, _ in by_rank],
            "positions": [position for _, _, position in by_rank],
            "seconds": round(seconds, 6),
            "tokens": result.num_tokens,
            "is_shortened": bool(result.is_shortened),
        } | _format_kept(result)


def _format_kept(result: Any) -> dict[str, Any]:
    """For generated rankings: [identifiers recovered, identifiers expected, strict] of every window."""
    answers = getattr(result, "answers", None)
    if answers is None:
        return {}
    return {"windows": [[answer.num_recovered, len(answer.order), answer.is_strict] for answer in answers]}


def _positions(ranker: Any, count: int) -> list[int]:
    """The 1-based place in the prompt of each document as given; position bias is read off these, not off the ranks."""
    if not hasattr(ranker, "reader"):
        return list(range(1, count + 1))
    order = ranker.reader.encoder.template.prompt_order(count)
    return [order.index(given) + 1 for given in range(count)]


def _requests(args: argparse.Namespace) -> list[Request]:
    """The work that the flags name; a selection that leaves nothing is an error."""
    only = options.read_id_list(args.only) if args.only else None
    if args.requests is not None:
        requests = requests_from_file(args.requests, depth=args.depth, shuffle=args.shuffle, only=only)
    else:
        requests = requests_from_collection(options.open_collection(args), depth=args.depth, shuffle=args.shuffle, only=only)
    if not requests:
        raise InputError("no query with candidates is left to rerank; check --only and the run")
    return requests


def _batches(requests: list[Request], size: int) -> Iterator[list[Request]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _build_ranker(args: argparse.Namespace) -> Any:
    """The method's ranker; --heads and the prompt switches reach every attention method alike."""
    from headrank.baselines import build_ranker
    from headrank.heads import HeadSet

    heads = HeadSet.load(args.heads) if args.heads else None
    changed = any(getattr(args, name) is not None for name in ("query_rows", "order", "max_words"))
    prompt = options.prompt_from(args, heads.prompt if heads else None) if changed else None
    return build_ranker(
        args.method,
        options.resolve_model(args.model),
        heads=heads,
        device=args.device,
        dtype=args.dtype,
        prompt=prompt,
        calibrate=not args.no_calibration,
        batch_size=args.batch_size,
        api_base=args.api_base,
    )


def _fingerprint(args: argparse.Namespace, requests: list[Request]) -> str:
    """A key of everything that decides the result, so that a changed command never continues another's work."""
    digest = hashlib.sha256()
    settings = {
        name: value
        for name, value in sorted(vars(args).items())
        if name not in ("output", "scores", "meta", "restart", "tag", "batch_size")
    }
    digest.update(json.dumps(settings, default=str).encode())
    for path in [Path(args.heads)] if args.heads else []:
        digest.update(path.read_bytes() if path.is_file() else b"")
    for path in sorted(Path(args.model).glob("*")) if Path(args.model).is_dir() else []:
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    for request in requests:
        digest.update(f"{request.query_id}\t{request.query}\t{[c.doc_id for c in request.candidates]}".encode())
    return digest.hexdigest()[:16]


def _write_outputs(args: argparse.Namespace, requests: list[Request], store: PartialResults, ranker: Any, facts: dict[str, Any]) -> None:
    """Write run, scores and facts from the finished lines, then drop the partial files."""
    tag = args.tag or args.method
    ranked: dict[str, list[tuple[str, float]]] = {}
    for request in requests:
        row = store.done[request.query_id]
        pairs = sorted(zip(row["doc_ids"], row["scores"], row["ranks"], strict=True), key=lambda item: (-item[1], item[2]))
        floor = min(score for _, score, _ in pairs)
        below = [(doc_id, floor - 1.0 - place) for place, doc_id in enumerate(request.rest)]
        ranked[request.query_id] = [(doc_id, score) for doc_id, score, _ in pairs] + below
    results = [store.done[request.query_id] for request in requests]
    if args.scores:
        write_jsonl(args.scores, results)
    if args.meta:
        write_json(args.meta, _facts(args, results, ranker, facts))
    if args.output.endswith(".jsonl"):
        from headrank.rank_llm_format import read_candidates_jsonl, write_candidates_jsonl

        wanted = {doc_id for rows in ranked.values() for doc_id, _ in rows}  # also those below the depth, which were not read before
        texts = read_candidates_jsonl(args.requests)[2] if args.requests else options.open_collection(args).documents(wanted)
        write_candidates_jsonl(args.output, {request.query_id: request.query for request in requests}, ranked, texts)
    else:
        write_run(args.output, ranked, tag)
    store.discard()
    shortened = sum(row["is_shortened"] for row in results)
    note = f"; in {shortened} the documents were shortened to fit the model's context" if shortened else ""
    print(f"{args.output}: {len(results)} queries reranked by {args.method}{note}", file=sys.stderr)


def _facts(args: argparse.Namespace, rows: list[dict[str, Any]], ranker: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """What the run cost and what it was made with."""
    from headrank.provenance import peak_memory_bytes, versions

    heads = getattr(ranker, "heads", None)
    return {
        "model": args.model,
        "method": args.method,
        "depth": args.depth,
        "order": "shuffled" if args.shuffle is not None else (args.order or "retriever"),
        "num_queries": len(rows),
        "seconds_per_query": sum(row["seconds"] for row in rows) / len(rows),
        "tokens_per_query": sum(row["tokens"] for row in rows) / len(rows),
        "peak_memory_bytes": peak_memory_bytes(),
        "layers_used": getattr(ranker, "layers_used", None),
        "num_layers": ranker.reader.num_layers if hasattr(ranker, "reader") else None,
        "heads": [list(head) for head in heads.heads] if heads is not None else None,
        "prompt_hash": ranker.reader.encoder.template.hash if hasattr(ranker, "reader") else None,
        "success": _success(rows),
        "versions": versions(),
        "command": sys.argv[1:],
        **facts,
    }


def _success(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Format success over all queries, whichever process or earlier run ranked them; None where nothing was generated."""
    if not any("windows" in row for row in rows):
        return None
    from headrank.baselines.rankgpt import ParsedAnswer, SuccessRates

    rates = SuccessRates()
    for row in rows:
        rates.add([ParsedAnswer(tuple(range(size)), recovered, strict) for recovered, size, strict in row.get("windows", [])])
    return rates.to_dict()


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
