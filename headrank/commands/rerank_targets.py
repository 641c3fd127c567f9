"""What one `headrank rerank` writes: a run, and on request scores and facts, for each method that shared the forward."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import require_writable, write_json, write_jsonl
from headrank.formats import followed_by_unread, read_corpus, write_run
from headrank.method.prompt import PromptTemplate
from headrank.methods import find_method
from headrank.reranking.rerank_requests import Request


@dataclass(frozen=True)
class Target:
    """One method of a run and where its files go; ``scores`` and ``meta`` may be None."""

    method: str
    heads: str | None
    output: str
    scores: str | None
    meta: str | None
    tag: str

    @property
    def paths(self) -> list[Path]:
        """The files this target writes."""
        return [Path(name) for name in (self.output, self.scores, self.meta) if name]


def targets_of(args: argparse.Namespace) -> list[Target]:
    """The command's own target, then one for each --also DIR=METHOD[:HEADS]."""
    if args.tag is not None and args.tag.split() != [args.tag]:
        raise InputError(f"--tag {args.tag!r} must be one word; a TREC run has six columns")
    targets = [Target(args.method, args.heads, args.output, args.scores, args.meta, args.tag or args.method)]
    for text in args.also:
        folder, equals, rest = text.partition("=")
        method, _, heads = rest.partition(":")
        if not (equals and folder and method):
            raise InputError(f"--also {text!r}: write DIR=METHOD or DIR=METHOD:HEADS.json")
        path = Path(folder)
        targets.append(Target(method, heads or None, str(path / "run.txt"), str(path / "scores.jsonl"), str(path / "meta.json"), method))
    paths = [path.resolve() for target in targets for path in target.paths]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} would be written twice; give --output, --scores, --meta and every --also DIR a place of its own")
    for target in targets:
        if target.heads is not None and not find_method(target.method).needs_heads:
            raise InputError(f"method {target.method!r} selects no heads; leave out {target.heads}")
        if target.heads == "all" and target.method != "headrank":
            raise InputError(f"method {target.method!r} is a selection of heads; all of them are --method icr")
    if len(targets) > 1:
        _check_can_share(targets)
    return targets


def require_places(targets: Sequence[Target], reads: Iterable[str | Path | None]) -> None:
    """Fail now, not after hours of work, when one of the files could not be written or is one of those that are read."""
    sources = [*reads, *(target.heads for target in targets)]
    for path in (path for target in targets for path in target.paths):
        if path.is_dir():
            raise InputError(f"{path}: cannot be written, it is a folder; give the name of a file")
        require_writable(path, sources)


def _check_can_share(targets: Sequence[Target]) -> None:
    """Only methods that read attention can share a forward."""
    for target in targets:
        method = find_method(target.method)
        kind = method.kind
        if kind != "attention":
            raise InputError(f"--also: method {target.method!r} is {kind} and reads no attention; rerank it in a command of its own")
        if method.needs_heads and target.heads is None and method.name != "headrank":
            raise InputError(f"--also: method {target.method!r} needs heads; write DIR={target.method}:HEADS.json")


def write_targets(
    args: argparse.Namespace,
    targets: Sequence[Target],
    requests: Sequence[Request],
    done: dict[str, dict[str, Any]],
    rankers: Sequence[Any],
    facts: dict[str, Any],
) -> None:
    """Write every target from the finished lines, the command's own last: once it is there, all are."""
    everything = {head for ranker in rankers for head in ranker.heads.heads} if len(targets) > 1 else set()
    for place in reversed(range(len(targets))):
        rows = [_row_of(done[request.query_id], place) for request in requests]
        ranker: Any = rankers[place] if place < len(rankers) else None
        shared = {
            "methods_sharing_the_forward": len(targets),
            "reads_the_whole_forward": not everything or everything == set(ranker.heads.heads),
        }
        _write_target(args, targets[place], requests, rows, ranker, facts | shared)


def _row_of(row: dict[str, Any], place: int) -> dict[str, Any]:
    """The result line of one target: its own scores, the rest in common."""
    scores = row["scores"] if place == 0 else row["also"][place - 1]
    return {key: value for key, value in row.items() if key != "also"} | {"scores": scores}


def _write_target(
    args: argparse.Namespace, target: Target, requests: Sequence[Request], rows: list[dict[str, Any]], ranker: Any, facts: dict[str, Any]
) -> None:
    """Run, scores and facts of one method."""
    ranked: dict[str, list[tuple[str, float]]] = {}
    for request, row in zip(requests, rows, strict=True):
        pairs = sorted(zip(row["doc_ids"], row["scores"], row["ranks"], strict=True), key=lambda item: (-item[1], item[2]))
        ranked[request.query_id] = followed_by_unread([(doc_id, score) for doc_id, score, _ in pairs], request.rest)
    Path(target.output).parent.mkdir(parents=True, exist_ok=True)
    if target.scores:
        write_jsonl(target.scores, rows)
    if target.meta:
        write_json(target.meta, _facts(args, target, rows, ranker, facts))
    if target.output.endswith(".jsonl"):
        from headrank.reranking.rank_llm_format import read_candidates_jsonl, write_candidates_jsonl

        wanted = {doc_id for pairs in ranked.values() for doc_id, _ in pairs}  # also those below the depth, whose texts nobody needs
        texts = read_candidates_jsonl(args.requests)[2] if args.requests else read_corpus(options.open_collection(args).corpus_path, wanted)
        write_candidates_jsonl(target.output, {request.query_id: request.query for request in requests}, ranked, texts)
    else:
        write_run(target.output, ranked, target.tag)
    shortened = sum(row["is_shortened"] for row in rows)
    note = f"; in {shortened} the documents were shortened to fit the model's context" if shortened else ""
    print(f"{target.output}: {len(rows)} queries reranked by {target.method}{note}", file=sys.stderr)


def template_of(ranker: Any) -> PromptTemplate | None:
    """The prompt of a ranker, which orders the documents; a first stage has none."""
    return ranker.reader.encoder.template if hasattr(ranker, "reader") else getattr(ranker, "prompt", None)


def _facts(args: argparse.Namespace, target: Target, rows: list[dict[str, Any]], ranker: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """What the run cost and what it was made with. A shared forward's cost is that of a method that reads all of it, as ICR."""
    from headrank.provenance import peak_memory_bytes, versions

    heads, template = getattr(ranker, "heads", None), template_of(ranker)
    return {
        "model": args.model,
        "method": target.method,
        "depth": args.depth,
        "order": "shuffled" if args.shuffle is not None else template.order if template else "retriever",
        "num_queries": len(rows),
        "seconds_per_query": sum(row["seconds"] for row in rows) / len(rows) if facts["reads_the_whole_forward"] else None,
        "tokens_per_query": sum(row["tokens"] for row in rows) / len(rows),
        "peak_memory_bytes": peak_memory_bytes() if facts["reads_the_whole_forward"] else None,
        "layers_used": getattr(ranker, "layers_used", None),
        "num_layers": ranker.reader.num_layers if hasattr(ranker, "reader") else None,
        "heads": [list(head) for head in heads.heads] if heads is not None else None,
        "prompt_hash": template.hash if template and heads is not None else None,
        "success": _success(rows),
        "versions": versions(),
        "command": sys.argv[1:],
        **facts,
    }


def _success(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Format success over all queries, whichever process or earlier run ranked them; None where nothing was generated."""
    if not any("windows" in row for row in rows):
        return None
    from headrank.generation.rankgpt import ParsedAnswer, SuccessRates

    rates = SuccessRates()
    for row in rows:
        rates.add([ParsedAnswer(tuple(range(size)), recovered, strict) for recovered, size, strict in row.get("windows", [])])
    return rates.to_dict()
