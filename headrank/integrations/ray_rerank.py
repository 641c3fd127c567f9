"""'headrank rerank --ray': a reranking job on the processes of a Ray cluster; its files are those of the job without
Ray.

A collection, or one file of requests, is read here and its lists are handed out. A Parquet file or a folder of requests
is read by the cluster, list by list, and the results alone come here: it may be larger than memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrank.artifacts import file_state, fingerprint
from headrank.errors import InputError
from headrank.files import write_json, write_jsonl
from headrank.formats import Document, read_query_ids, write_run
from headrank.integrations.ray_data import Workers, connect, find_workers, whole_path
from headrank.reranking.elsewhere import outlines
from headrank.reranking.partial_results import PartialResults
from headrank.reranking.rerank_job import RerankJob, build_rankers, job_key, progress_of, rerank, score_lists
from headrank.reranking.rerank_outputs import check_targets, facts_of, ranked_list, require_places
from headrank.reranking.rerank_requests import Request, request_from_row

import pyarrow  # isort: skip - after ray_data, which says how to install it
import ray

_LISTS_AT_A_TIME = 32  # at most; fewer where there are few, so that every process gets some
_ENDINGS = (".jsonl", ".jsonl.gz")
_DOCUMENTS, _REST = "documents", "rest"  # what a line of a streamed job holds besides


def rerank_on_ray(job: RerankJob, address: str | None = None, workers: int | None = None) -> None:
    """Do a job's work on a cluster and write its files."""
    if job.store_add:
        raise InputError(
            "`store_add` has one writer, and `ray` many processes; fill the store with 'headrank index --ray' before"
        )
    check_targets(job.targets)
    is_streamed = job.requests is not None and (Path(job.requests).is_dir() or job.requests.endswith(".parquet"))
    parts = _parts(Path(str(job.requests))) if is_streamed else []
    connect(address, workers)
    job = _for_other_machines(job)
    found = find_workers(job.device, workers, spare=int(is_streamed))
    if is_streamed:
        _rerank_stream(job, parts, found)
    else:
        rerank(job, _Cluster(found))


def _for_other_machines(job: RerankJob) -> RerankJob:
    """The job with whole paths: processes of a cluster begin in folders of their own."""
    targets = tuple(dataclasses.replace(target, heads=whole_path(target.heads)) for target in job.targets)
    return dataclasses.replace(
        job, model=whole_path(job.model) or job.model, store=whole_path(job.store), targets=targets
    )


@dataclasses.dataclass(frozen=True)
class _Cluster:
    """The processes of a cluster as an ``Elsewhere`` of a reranking job."""

    workers: Workers

    def facts(self) -> dict[str, Any]:
        """Loading is part of ranking: processes load while others rank."""
        return {"engine": "ray", "processes": self.workers.count}

    def rows(self, job: RerankJob, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        """The result line of every list."""
        size = max(job.batch_size or 1, min(_LISTS_AT_A_TIME, len(requests) // (4 * self.workers.count)))
        num_blocks = -(-len(requests) // size)
        packed = [{"list": pickle.dumps(request)} for request in requests]
        workers = dataclasses.replace(self.workers, count=min(self.workers.count, num_blocks))
        dataset = ray.data.from_items(packed, override_num_blocks=num_blocks)
        yield from _lines(workers.map(dataset, _ListScorer, dataclasses.replace(job, device=workers.device)))


def _lines(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows that the processes made; what one refused is the job's InputError."""
    for row in dataset.iter_rows():
        if row["refusal"]:
            raise InputError(row["refusal"])
        yield json.loads(row["line"])


def _table(lines: Sequence[str], refusal: str = "") -> pyarrow.Table:
    """Result lines, or one row that says why there are none: an error raised in a process would come as Ray's
    traceback.
    """
    lines, refusals = ([""], [refusal]) if refusal else (lines, [""] * len(lines))
    return pyarrow.table(
        {"line": pyarrow.array(lines, pyarrow.string()), "refusal": pyarrow.array(refusals, pyarrow.string())}
    )


class _ListScorer:
    """One process: the rankers of a job, and the lists that come to it."""

    def __init__(self, job: RerankJob) -> None:
        self.job, self.rankers, self.refusal = job, list[Any](), ""
        try:
            self.rankers = build_rankers(job)
        except InputError as error:
            self.refusal = str(error)

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """The result lines of whole lists."""
        if self.refusal:
            return _table([], self.refusal)
        try:
            return _table([json.dumps(line) for line in self.lines(rows)])
        except InputError as error:
            return _table([], str(error))

    def lines(self, rows: pyarrow.Table) -> Iterator[dict[str, Any]]:
        """Rows are requests that this very job packed."""
        requests = [pickle.loads(packed) for packed in rows["list"].to_pylist()]
        for batch in score_lists(self.job, self.rankers, requests):
            yield from batch


class _RequestScorer(_ListScorer):
    """One process of a streamed job: rows are rank_llm requests, as lines of JSON or as columns of Parquet."""

    def __init__(self, job: RerankJob, done: frozenset[str], only: frozenset[str] | None) -> None:
        super().__init__(job)
        self.done, self.only = done, only

    def lines(self, rows: pyarrow.Table) -> Iterator[dict[str, Any]]:
        """The lines of what is wanted and not done, with all that the outputs need."""
        wanted: dict[str, tuple[Request, dict[str, Document]]] = {}
        for row in rows.to_pylist():
            request, texts = self._request(row)
            if request is None or (self.only is not None and request.query_id not in self.only):
                continue
            # one that comes twice is refused where all are seen
            if request.query_id in self.done or request.query_id in wanted:
                yield {"query_id": request.query_id, "is_done": True}
            else:
                wanted[request.query_id] = request, texts
        for batch in score_lists(self.job, self.rankers, [request for request, _ in wanted.values()]):
            for line in batch:
                request, texts = wanted[line["query_id"]]
                more: dict[str, Any] = {_REST: list(request.rest)}
                if self.job.targets[0].output.endswith(".jsonl"):
                    docs = {item.doc_id: {"title": item.title, "text": item.text} for item in texts.values()}
                    more[_DOCUMENTS] = {"query": request.query, "docs": docs}
                yield line | more

    def _request(self, row: dict[str, Any]) -> tuple[Request | None, dict[str, Document]]:
        place, texts = str(row.pop("path", "a row")), dict[str, Document]()
        if "candidates" not in row and "text" in row:
            row = _parsed(place, row["text"])
        # Parquet has one schema for all documents: what one lacks is null
        for candidate in row.get("candidates") or ():
            if isinstance(candidate, dict) and isinstance(candidate.get("doc"), dict):
                candidate["doc"] = {key: value for key, value in candidate["doc"].items() if value is not None}
        return request_from_row(place, row, texts, depth=self.job.depth, shuffle=self.job.shuffle), texts


def _parsed(place: str, line: str) -> dict[str, Any]:
    """A line of JSON; Ray does not tell its number."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: a line is not JSON ({error}): {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise InputError(
            f"{place}: a line is not a JSON object: {line[:60]!r}; a request is {{query, candidates}} on a line of "
            "its own"
        )
    return row


def _parts(source: Path) -> list[Path]:
    """The Parquet or JSONL files of a folder, or the one file."""
    if source.is_file():
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else []
    for endings in ((".parquet",), _ENDINGS):
        chosen = [path.absolute() for path in files if path.name.endswith(endings)]
        if chosen:
            return chosen
    raise InputError(f"{source}: no requests there; it needs files *.parquet or *.jsonl of rank_llm requests")


def _rerank_stream(job: RerankJob, parts: Sequence[Path], workers: Workers) -> None:
    """Requests that the cluster reads; what comes back is written as it comes, and put together in the end."""
    require_places(job.targets, reads=[*parts, job.only])
    only = frozenset(read_query_ids(job.only)) if job.only else None
    output = Path(job.targets[0].output)
    key = fingerprint([job_key(job, []), [[str(path), file_state(path)] for path in parts]])
    partial = PartialResults(output, key, 0, restart=job.restart, only_ids=True)
    read = ray.data.read_parquet if parts[0].suffix == ".parquet" else ray.data.read_text
    dataset = read([str(path) for path in parts], include_paths=True)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    made = workers.map(
        dataset, _RequestScorer, dataclasses.replace(job, device=workers.device), frozenset(partial.done), only
    )
    started, seen = time.perf_counter(), set[str]()
    with contextlib.closing(progress_of(_lines(made), None)) as lines:
        for line in lines:
            if line["query_id"] in seen:
                raise InputError(
                    f"{job.requests}: query {line['query_id']!r} appears twice; give every list its own id"
                )
            seen.add(line["query_id"])
            if "is_done" not in line:
                partial.add([line])
    partial.close()
    if not seen:
        raise InputError(f"{job.requests}: no query with candidates is left to rerank; check the chosen query ids")
    _write(job, PartialResults(output, key, 0, only_ids=True), workers, time.perf_counter() - started)


def _write(job: RerankJob, partial: PartialResults, workers: Workers, seconds: float) -> None:
    """The job's files, line by line; the run last, as without Ray."""
    target, hidden = job.targets[0], (_DOCUMENTS, _REST)
    rows = ({key: value for key, value in row.items() if key not in hidden} for row in partial.rows())
    if target.scores:
        write_jsonl(target.scores, rows)
    if target.meta:
        kept = ("seconds", "tokens", "is_shortened", "windows")
        facts = {
            "load_seconds": 0.0,
            "rank_seconds": seconds,
            "reads_the_whole_forward": True,
            "methods_sharing_the_forward": 1,
        }
        costs = [{key: row[key] for key in kept if key in row} for row in partial.rows()]
        write_json(target.meta, facts_of(job, target, costs, outlines(job)[0], facts | _Cluster(workers).facts()))
    if target.output.endswith(".jsonl"):
        write_jsonl(target.output, map(_result, partial.rows()))
    else:
        write_run(
            target.output,
            ((row["query_id"], ranked_list(row, row[_REST])) for row in partial.rows()),
            target.tag or target.method,
        )
    partial.discard()


def _result(row: dict[str, Any]) -> dict[str, Any]:
    """One rank_llm result."""
    kept = row[_DOCUMENTS]
    candidates = [
        {"docid": doc_id, "score": score, "doc": kept["docs"][doc_id]} for doc_id, score in ranked_list(row, row[_REST])
    ]
    return {"query": {"text": kept["query"], "qid": row["query_id"]}, "candidates": candidates}
