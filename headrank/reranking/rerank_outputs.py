"""What a reranking writes: a run, and on request scores and facts, for each method that shared the forward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.errors import InputError
from headrank.files import require_writable, write_json, write_jsonl
from headrank.formats import append_unranked, read_corpus, write_run
from headrank.method.prompt import PromptTemplate
from headrank.methods import find_method
from headrank.reranking.rerank_requests import Request

if TYPE_CHECKING:
    from headrank.reranking.rerank_job import RerankJob


@dataclass(frozen=True)
class Target:
    """One method of a job and where its files go; ``scores`` and ``meta`` may be None."""

    method: str
    output: str
    heads: str | None = None
    scores: str | None = None
    meta: str | None = None
    tag: str | None = None  # the run's name, its last column; default: the method

    @property
    def paths(self) -> list[Path]:
        """The files this target writes."""
        return [Path(name) for name in (self.output, self.scores, self.meta) if name]


def check_targets(targets: Sequence[Target]) -> None:
    """Refuse what cannot be written or cannot share a forward, before a model is loaded."""
    paths = [path.resolve() for target in targets for path in target.paths]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} would be written twice; give every file a place of its own")
    for target in targets:
        if target.tag is not None and target.tag.split() != [target.tag]:
            raise InputError(f"tag {target.tag!r} must be one word; a TREC run has six columns")
        if target.heads is not None and not find_method(target.method).needs_heads:
            raise InputError(f"method {target.method!r} selects no heads; leave out {target.heads}")
        if target.heads == "all" and target.method != "headrank":
            raise InputError(f"method {target.method!r} is a selection of heads; all of them are method icr")
    if len(targets) > 1:
        _check_can_share(targets)


def _check_can_share(targets: Sequence[Target]) -> None:
    """Only methods that read attention can share a forward."""
    for target in targets:
        method = find_method(target.method)
        if method.kind != "attention":
            raise InputError(
                f"method {target.method!r} is {method.kind}, reads no attention and shares no forward; rerank it alone"
            )
        if method.needs_heads and target.heads is None and method.name != "headrank":
            raise InputError(f"method {target.method!r} needs heads; give a heads.json")


def require_places(targets: Sequence[Target], reads: Iterable[str | Path | None]) -> None:
    """Fail now, not after hours of work, when a file could not be written or is one of those that are read."""
    sources = [*reads, *(target.heads for target in targets)]
    for path in (path for target in targets for path in target.paths):
        if path.is_dir():
            raise InputError(f"{path}: cannot be written, it is a folder; give the name of a file")
        require_writable(path, sources)


def write_targets(
    job: RerankJob,
    requests: Sequence[Request],
    done: Mapping[str, Mapping[str, Any]],
    rankers: Sequence[Any],
    facts: Mapping[str, Any],
) -> None:
    """Write every target from the finished lines, the first one last: once it is there, all are."""
    targets = job.targets
    everything = {head for ranker in rankers for head in ranker.heads.heads} if len(targets) > 1 else set()
    # the first target last: its run file is what says that the job is done
    for place in reversed(range(len(targets))):
        rows = [_row_of(done[request.query_id], place) for request in requests]
        ranker: Any = rankers[place] if place < len(rankers) else None
        shared = {
            "methods_sharing_the_forward": len(targets),
            "reads_the_whole_forward": not everything or everything == set(ranker.heads.heads),
        }
        _write_target(job, targets[place], requests, rows, ranker, {**facts, **shared})


def _row_of(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The result line of one target: its own scores, the rest in common."""
    scores = row["scores"] if place == 0 else row["also"][place - 1]
    return {key: value for key, value in row.items() if key != "also"} | {"scores": scores}


def _write_target(
    job: RerankJob,
    target: Target,
    requests: Sequence[Request],
    rows: list[dict[str, Any]],
    ranker: Any,
    facts: dict[str, Any],
) -> None:
    """Run, scores and facts of one method."""
    ranked: dict[str, list[tuple[str, float]]] = {}
    for request, row in zip(requests, rows, strict=True):
        ranked[request.query_id] = ranked_list(row, request.rest)
    Path(target.output).parent.mkdir(parents=True, exist_ok=True)
    if target.scores:
        write_jsonl(target.scores, rows)
    if target.meta:
        write_json(target.meta, facts_of(job, target, rows, ranker, facts))
    if target.output.endswith(".jsonl"):
        from headrank.reranking.rank_llm_format import read_candidates_jsonl, write_candidates_jsonl

        # also those below the depth, whose texts nobody needs
        wanted = {doc_id for pairs in ranked.values() for doc_id, _ in pairs}
        texts = (
            read_candidates_jsonl(job.requests)[2]
            if job.requests
            else read_corpus(job.open_collection().corpus_path, wanted)
        )
        write_candidates_jsonl(target.output, {request.query_id: request.query for request in requests}, ranked, texts)
    else:
        write_run(target.output, ranked, target.tag or target.method)
    shortened = sum(row["is_shortened"] for row in rows)
    note = f"; in {shortened} the documents were shortened to fit the model's context" if shortened else ""
    sys.stderr.write(f"{target.output}: {len(rows)} queries reranked by {target.method}{note}\n")


def ranked_list(row: Mapping[str, Any], rest: Iterable[str]) -> list[tuple[str, float]]:
    """(document id, score) of a result line, best first, ties in the retriever's order; below it the ``rest``."""
    pairs = sorted(zip(row["doc_ids"], row["scores"], row["ranks"], strict=True), key=lambda item: (-item[1], item[2]))
    return append_unranked([(doc_id, score) for doc_id, score, _ in pairs], rest)


def template_of(ranker: Any) -> PromptTemplate | None:
    """The prompt of a ranker, which orders the documents; a first stage has none."""
    return ranker.reader.encoder.template if hasattr(ranker, "reader") else getattr(ranker, "prompt", None)


def facts_of(
    job: RerankJob, target: Target, rows: list[dict[str, Any]], ranker: Any, facts: dict[str, Any]
) -> dict[str, Any]:
    """What the run cost and what it was made with. A shared forward's cost is that of a method that reads all of it,
    as ICR.
    """
    from headrank.provenance import peak_memory_bytes, versions

    heads, template = getattr(ranker, "heads", None), template_of(ranker)
    return {
        "model": job.model,
        "method": target.method,
        "depth": job.depth,
        "order": "shuffled" if job.shuffle is not None else template.order if template else "retriever",
        "num_queries": len(rows),
        "seconds_per_query": _seconds(rows) if facts["reads_the_whole_forward"] else None,
        "warm_up_queries": sum(bool(row.get("is_warm_up")) for row in rows),
        "tokens_per_query": sum(row["tokens"] for row in rows) / len(rows),
        "peak_memory_bytes": peak_memory_bytes()
        if facts["reads_the_whole_forward"] and facts.get("engine") is None
        else None,
        "layers_used": getattr(ranker, "layers_used", None),
        "num_layers": heads.num_layers if heads is not None else None,
        "heads": [list(head) for head in heads.heads] if heads is not None else None,
        "prompt_hash": template.hash if template and heads is not None else None,
        "success": _success(rows),
        "versions": versions(),
        "command": list(job.command),
        **facts,
    }


def _seconds(rows: list[dict[str, Any]]) -> float:
    """The mean over queries without each process's first batch, unless there is nothing else."""
    timed = [row["seconds"] for row in rows if not row.get("is_warm_up")] or [row["seconds"] for row in rows]
    return sum(timed) / len(timed)


def _success(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Format success over all queries, whichever process or earlier run ranked them; None where nothing was
    generated.
    """
    if not any("windows" in row for row in rows):
        return None
    from headrank.generation.rankgpt import ParsedAnswer, SuccessRates

    rates = SuccessRates()
    for row in rows:
        rates.add(
            [ParsedAnswer(tuple(range(size)), recovered, strict) for recovered, size, strict in row.get("windows", [])]
        )
    return rates.to_dict()
