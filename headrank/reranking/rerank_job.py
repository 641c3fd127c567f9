"""Rerank a whole collection: a frozen description of the work, and the function that does it.

`headrank rerank`, the cells of a benchmark matrix and those of a study are all such jobs. An interrupted job goes on
where it stopped: finished queries lie in OUTPUT.partial*.jsonl until the run is complete. Under torchrun the processes
share the queries; an ``Elsewhere`` scores them on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headrank.artifacts import content_digest, file_state, fingerprint
from headrank.errors import InputError
from headrank.formats import Collection, read_query_ids
from headrank.method.prompt import PromptTemplate
from headrank.reranking import shipped_readouts
from headrank.reranking.elsewhere import Elsewhere, outlines
from headrank.reranking.model_sources import EMBEDDED
from headrank.reranking.partial_results import PartialResults
from headrank.reranking.rerank_outputs import Target, check_targets, require_places, write_targets
from headrank.reranking.rerank_requests import Request, requests_from_collection, requests_from_file
from headrank.torchrun import barrier, world

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
# fields that change no score
_NO_INFLUENCE = ("targets", "restart", "batch_size", "store_add", "key_cache_mb", "command")


@dataclass(frozen=True)
class RerankJob:
    """Candidates to rerank, a model, and one or more methods that read it. Several methods share every forward.

    The candidates come from a collection folder, with single files in place of its own, or from a rank_llm ``requests``
    file. ``prompt`` holds the switches of the prompt that were given; all others stay as the heads were selected with.
    """

    model: str
    targets: tuple[Target, ...]
    collection: str | None = None
    queries: str | None = None
    corpus: str | None = None
    run: str | None = None
    requests: str | None = None
    depth: int = 40
    shuffle: int | None = None
    only: str | None = None
    prompt: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    batch_size: int | None = None  # queries at a time; None: what suits the method
    calibrate: bool = True
    api_base: str | None = None
    store: str | None = None
    store_add: bool = False
    key_cache_mb: int | None = None
    restart: bool = False
    command: tuple[str, ...] = ()

    def open_collection(self) -> Collection:
        """The collection that the candidates come from."""
        return Collection.open(self.collection, queries=self.queries, corpus=self.corpus, run=self.run)


def rerank(job: RerankJob, elsewhere: Elsewhere | None = None) -> None:
    """Do the work, here or elsewhere, and write the files of every target."""
    check_targets(job.targets)
    rank, world_size = world()
    requests = _requests(job)
    if rank == 0:
        require_places(
            job.targets, reads=[job.requests, job.only, *([] if job.requests else job.open_collection().paths)]
        )
    output, key = Path(job.targets[0].output), job_key(job, requests)
    store = PartialResults(output, key, rank, restart=job.restart)
    barrier(world_size)  # all see the same finished queries, or the shares below would not fit together
    # every world_size-th and not blocks: lists get longer towards the end of some collections
    pending = [request for request in requests if request.query_id not in store.done][rank::world_size]
    if store.done:
        _log.info("%s: %d of %d queries were done before, going on", output, len(store.done), len(requests))
    started = time.perf_counter()
    if elsewhere is not None:
        rankers, loaded = outlines(job), started
        with contextlib.closing(
            progress_of(elsewhere.rows(job, pending) if pending else iter(()), len(pending))
        ) as rows:
            for row in rows:
                store.add([row])
    else:
        # a finished run that is only written again loads no model, unless its facts are asked for
        rankers = build_rankers(job) if pending or (rank == 0 and any(target.meta for target in job.targets)) else []
        loaded = time.perf_counter()
        with contextlib.closing(progress_of(pending, len(pending))) as bar:  # an error has its line to itself
            for number, batch in enumerate(score_lists(job, rankers, bar if rank == 0 else pending)):
                # the first batch also pays for kernels, caches and memory that the others find: it is marked, and
                # counts in no mean of
                # seconds
                store.add(({**row, "is_warm_up": True} for row in batch) if number == 0 else batch)
    store.close()
    barrier(world_size)
    if rank == 0:
        facts = {
            "load_seconds": loaded - started,
            "rank_seconds": time.perf_counter() - loaded,
            "processes": world_size,
        }
        finished = PartialResults(output, key, rank)
        write_targets(
            job, requests, finished.done, rankers, facts | (elsewhere.facts() if elsewhere is not None else {})
        )
        finished.discard()
    barrier(world_size, last=True)


def progress_of(items: Iterable[Item], total: int | None) -> Generator[Item, None, None]:
    """A bar on stderr, from the first query on: no error message is glued to an empty bar."""
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc="rerank", unit="query", dynamic_ncols=True, mininterval=0.5)


def score_lists(
    job: RerankJob, rankers: Sequence[Any], requests: Iterable[Request]
) -> Iterator[Iterator[dict[str, Any]]]:
    """The result lines of the lists, batch by batch as the job or the ranker wants them."""
    size: int = job.batch_size or getattr(next(iter(rankers), None), "batch_size", None) or 1
    for batch in _batches(requests, size):
        yield _score(rankers, batch)


def _score(rankers: Sequence[Any], batch: list[Request]) -> Iterator[dict[str, Any]]:
    """One result line per query of a batch; the time of a batch is shared evenly."""
    started = time.perf_counter()
    lists = [(request.query, [{"title": d.title, "text": d.text} for d in request.documents]) for request in batch]
    results = (
        [[result] for result in rankers[0].score_batch(lists)] if len(rankers) == 1 else _shared_scores(rankers, lists)
    )
    # a batch has one time: its queries share it evenly
    seconds = (time.perf_counter() - started) / len(batch)
    for request, (result, *others) in zip(batch, results, strict=True):
        # kept in the retriever's order whatever order was read, so that runs of other orders can be compared line by
        # line
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
    from headrank.reranking.prompt_reranker import shared_scores

    return shared_scores(rankers, lists)


def _format_kept(result: Any) -> dict[str, Any]:
    """For generated rankings: [identifiers recovered, identifiers expected, strict] of every window."""
    answers = getattr(result, "answers", None)
    if answers is None:
        return {}
    return {"windows": [[answer.num_recovered, len(answer.order), answer.is_strict] for answer in answers]}


def _requests(job: RerankJob) -> list[Request]:
    """The work of a job; a selection that leaves nothing is an error."""
    only = read_query_ids(job.only) if job.only else None
    if job.requests is not None:
        if job.collection or job.queries or job.corpus or job.run:
            raise InputError(
                "requests bring their own queries, candidates and texts; leave out collection, queries, corpus and run"
            )
        requests = requests_from_file(job.requests, depth=job.depth, shuffle=job.shuffle, only=only)
    else:
        requests = requests_from_collection(job.open_collection(), depth=job.depth, shuffle=job.shuffle, only=only)
    if not requests:
        raise InputError("no query with candidates is left to rerank; check the chosen query ids and the run")
    return requests


def _batches(requests: Iterable[Request], size: int) -> Iterator[list[Request]]:
    left = iter(requests)
    while batch := list(itertools.islice(left, size)):
        yield batch


def build_rankers(job: RerankJob) -> list[Any]:
    """The ranker of every target; several read one model, loaded as deep as the deepest of them needs."""
    if len(job.targets) == 1:
        return [_build_ranker(job, job.targets[0])]
    from headrank.reranking.reader import AttentionReader
    from headrank.reranking.reranker import HeadRankReranker, choose_heads

    # targets share a forward, so a method that names no readout of the trained model decides for the model as it is
    names = ["all" if target.method == "icr" else target.heads for target in job.targets]
    base = next((name for name in names if name is not None and name not in shipped_readouts.TRAINED), names[0])
    model, first = shipped_readouts.model_to_read(job.model, base), job.targets[0]
    sets = [choose_heads(model, name) for name in names]
    prompts = [dataclasses.replace(heads.prompt, **job.prompt) for heads in sets]
    for target, prompt in zip(job.targets[1:], prompts[1:], strict=True):
        if prompt.hash != prompts[0].hash:
            raise InputError(
                f"{first.method} and {target.method} have different prompts ({_difference(prompts[0], prompt)}; icr "
                "has the default "
                "one), and one forward has one: set that switch of the prompt, or rerank them separately"
            )
    sets = [dataclasses.replace(heads, prompt=prompt) for heads, prompt in zip(sets, prompts, strict=True)]
    last_layer = max(heads.l_max for heads in sets)
    reader = AttentionReader.load(model, prompt=prompts[0], last_layer=last_layer, device=job.device, dtype=job.dtype)
    common: dict[str, Any] = {
        "calibrate": job.calibrate,
        "batch_size": job.batch_size,
        "store": job.store,
        "store_add": job.store_add,
    }
    return [HeadRankReranker.from_reader(reader, heads, **common, **_key_cache(job)) for heads in sets]


def _key_cache(job: RerankJob) -> dict[str, Any]:
    """The size of the late layout's memory, where it was given."""
    if job.key_cache_mb is not None and job.key_cache_mb < 0:
        raise InputError(f"`key_cache_mb` {job.key_cache_mb} must be at least 0")
    return {} if job.key_cache_mb is None else {"key_cache_bytes": job.key_cache_mb << 20}


def _difference(one: PromptTemplate, other: PromptTemplate) -> str:
    """The first field in which two prompts differ, with both values."""
    name = next(
        field.name for field in dataclasses.fields(one) if getattr(one, field.name) != getattr(other, field.name)
    )
    return f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"


def _build_ranker(job: RerankJob, target: Target) -> Any:
    """The method's ranker; heads and prompt switches reach every attention method alike. A first stage needs no
    model.
    """
    from headrank.methods import FirstStage, build_ranker, find_method

    if find_method(target.method).kind == "first-stage":
        return FirstStage()
    from headrank.reranking.reranker import choose_heads

    own = target.heads or ("" if target.method != "headrank" else None)
    model = shipped_readouts.model_to_read(job.model, own)
    heads = choose_heads(model, own) if own != "" else None
    prompt = dataclasses.replace(heads.prompt if heads else PromptTemplate(), **job.prompt) if job.prompt else None
    return build_ranker(
        target.method,
        model,
        heads=heads,
        device=job.device,
        dtype=job.dtype,
        prompt=prompt,
        calibrate=job.calibrate,
        batch_size=job.batch_size,
        api_base=job.api_base,
        store=job.store,
        store_add=job.store_add or None,
        **_key_cache(job),
    )


def job_key(job: RerankJob, requests: Sequence[Request]) -> str:
    """Sixteen digits of everything that decides the scores, so that a changed job never continues another's work."""
    settings = {
        item.name: getattr(job, item.name) for item in dataclasses.fields(job) if item.name not in _NO_INFLUENCE
    }
    heads = [_heads_state(job, target) for target in job.targets]
    lists = [
        [
            request.query_id,
            request.query,
            [c.doc_id for c in request.candidates],
            [[d.title, d.text] for d in request.documents],
        ]
        for request in requests
    ]
    # where results go is left out: a moved output goes on from what was computed
    methods = [target.method for target in job.targets]
    model = file_state(job.model) if Path(job.model).is_dir() else job.model
    return fingerprint([settings, methods, heads, model, lists, *_store_state(job)])


def _store_state(job: RerankJob) -> list[str]:
    """What the store's numbers are: one that was made anew with another format or pool gives other scores."""
    header = Path(job.store or "") / "store.json"
    return [content_digest(header)] if job.store and header.is_file() else []


def _heads_state(job: RerankJob, target: Target) -> str | None:
    """The content of the heads' file, also of a readout that the package brings, which another version may have
    fitted anew.
    """
    given = target.heads
    if given in shipped_readouts.NAMES or (given is None and target.method == "headrank" and job.model == EMBEDDED):
        return fingerprint([file_state(path) for path in shipped_readouts.files(given or shipped_readouts.DEFAULT)])
    return content_digest(given) if given and Path(given).is_file() else given
