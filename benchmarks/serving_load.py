"""Load on a real server: `make load-test`, or `python -m benchmarks.serving_load --requests 2000`.

`headrank serve` runs as a process of its own on loopback, once without and once with a passage store, and gets the
requests of one pool of lists (the first queries of a collection with their first 20 candidates) in random order, at
each concurrency, over connections that are kept. Every answer is compared with the scores that the same model gives
offline: all documents, the same bits. Printed are errors, wrong answers, p50 / p95 / p99 of the answer time, requests
per second, what was found in memory and in the store, and the server's memory over the run, which must be flat: the
largest of the last quarter against the largest of the second one.

Without a store the server still remembers the keys of recent passages (--key-cache-mb): the first visit of each list is
cold, the others are not. `--key-cache-mb 0` measures a server that computes every passage again: give it fewer
--requests. The exit code is 1 when an answer is missing or wrong, or memory grew.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.server_process import ServerProcess
from headrank.formats import Collection
from headrank.passage_store.indexing import IndexSettings, index_corpus
from headrank.reranking.late_reranker import LateReranker
from headrank.reranking.rerank_requests import requests_from_collection
from headrank.reranking.reranker import HeadRankReranker

_SAMPLES = 40  # of the server's memory, over one run


@dataclass(frozen=True)
class Listed:
    """One list of the pool: the request's bytes, and the score of each document offline."""

    query: str
    documents: list[dict[str, str]]
    scores: list[float]

    @property
    def body(self) -> bytes:
        """As it is sent; offline a long document is not read in chunks either."""
        return json.dumps({"query": self.query, "documents": self.documents, "max_chunks_per_doc": 1}).encode()


@dataclass
class Outcome:
    """What one run of requests saw."""

    store: bool
    concurrency: int
    requests: int
    seconds: float = 0.0
    answered: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """Bytes by which the last quarter's largest memory exceeds the second quarter's; 0 for runs too short to
        say.
        """
        quarter = len(self.memory) // 4
        return 0.0 if quarter < 2 else float(max(self.memory[-quarter:]) - max(self.memory[quarter : 2 * quarter]))

    def is_good(self, most_growth: float) -> bool:
        """Every answer there and right, and memory flat."""
        is_flat = not self.memory or self.growth <= most_growth * max(self.memory)
        return self.answered == self.requests and not self.wrong and not self.errors and is_flat

    def line(self) -> str:
        """For people."""
        p50, p95, p99 = (
            (1000 * np.percentile(self.latencies, share) for share in (50, 95, 99)) if self.latencies else (0.0,) * 3
        )
        found = ", ".join(f"{name} {share:.1%}" for name, share in self.found.items())
        return (
            f"{'store' if self.store else 'no store':>8}  c={self.concurrency:<3} {self.answered}/{self.requests} "
            "right "
            f"{self.answered - self.wrong}, errors {len(self.errors)}  p50 {p50:.0f} p95 {p95:.0f} p99 {p99:.0f} ms  "
            f"{self.answered / max(self.seconds, 1e-9):.1f} requests/s  memory "
            f"{max(self.memory, default=0) / 2**20:.0f} MB "
            f"({self.growth / 2**20:+.1f})  found: {found or '-'}"
        )


def drive(
    server: ServerProcess, pool: Sequence[Listed], *, requests: int, concurrency: int, seed: int, has_store: bool
) -> Outcome:
    """Send ``requests`` requests from ``concurrency`` threads, and look at every answer."""
    outcome = Outcome(has_store, concurrency, requests)
    chosen = random.Random(seed).choices(range(len(pool)), k=requests)
    left, lock, before = iter(chosen), threading.Lock(), server.metrics()
    bodies = [listed.body for listed in pool]
    sample_every = max(1, requests // _SAMPLES)

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                break
            started = time.perf_counter()
            try:
                connection.request("POST", "/v2/rerank", bodies[number], {"Content-Type": "application/json"})
                response = connection.getresponse()
                status, content = response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                status, content = 0, repr(error).encode()
            seconds = time.perf_counter() - started
            with lock:
                _note(outcome, pool[number], status, content, seconds)
                if (outcome.answered + len(outcome.errors)) % sample_every == 0:
                    outcome.memory.append(server.resident_bytes())
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.perf_counter() - started
    outcome.found = _shares_found(before, server.metrics())
    return outcome


def _note(outcome: Outcome, listed: Listed, status: int, content: bytes, seconds: float) -> None:
    """One answer: its scores must be those of its own list, to the bit."""
    if status != 200:
        outcome.errors.append(f"{status}: {content[:200]!r}")
        return
    outcome.answered += 1
    outcome.latencies.append(seconds)
    results = {row["index"]: row["relevance_score"] for row in json.loads(content)["results"]}
    outcome.wrong += results != dict(enumerate(listed.scores))


def _shares_found(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the passages looked for in this run the share found."""
    shares = {}
    for name in ("store", "recent"):
        asked, found = (f"headrank_{name}_passages_{what}_total" for what in ("asked", "found"))
        if after.get(asked, 0.0) > before.get(asked, 0.0):
            shares[name] = (after[found] - before[found]) / (after[asked] - before[asked])
    return shares


def make_pool(reranker: HeadRankReranker, lists: Sequence[tuple[str, list[dict[str, str]]]]) -> list[Listed]:
    """The lists with their offline scores, each computed alone."""
    return [Listed(query, documents, reranker.score(query, documents).tolist()) for query, documents in lists]


def lists_of(collection: str, num_lists: int, num_passages: int) -> list[tuple[str, list[dict[str, str]]]]:
    """The first queries with as many candidates."""
    found = []
    for request in requests_from_collection(Collection.open(collection), depth=num_passages):
        documents = [{"title": document.title, "text": document.text} for document in request.documents]
        found.append((request.query, documents))
    return found[:num_lists]


def make_store(reranker: HeadRankReranker, folder: Path, pool: Sequence[Listed]) -> None:
    """An int8 store of every passage of the pool."""
    assert isinstance(reranker, LateReranker)
    passages = list(
        dict.fromkeys((document["title"], document["text"]) for listed in pool for document in listed.documents)
    )
    index_corpus(folder, reranker.late, lambda: iter(passages), IndexSettings("int8"))


def run_all(args: argparse.Namespace) -> Iterator[Outcome]:
    """Without a store and, for late heads, with one."""
    options = {"heads": args.heads, "dtype": args.dtype}
    reranker = HeadRankReranker.from_pretrained(args.model, **options)
    pool = make_pool(reranker, lists_of(args.collection, args.lists, args.passages))
    common = [
        "--model",
        args.model,
        *(["--heads", args.heads] if args.heads else []),
        *(["--dtype", args.dtype] if args.dtype else []),
    ]
    cache = ["--key-cache-mb", str(args.key_cache_mb)] if args.key_cache_mb is not None else []
    with tempfile.TemporaryDirectory(prefix="headrank-load-") as folder:
        yield from _of_server(args, [*common, *cache], pool, has_store=False)
        if not isinstance(reranker, LateReranker) or args.without_store_only:
            return
        make_store(reranker, Path(folder) / "store", pool)
        stored = HeadRankReranker.from_pretrained(args.model, store=Path(folder) / "store", **options)
        pool = make_pool(stored, [(listed.query, listed.documents) for listed in pool])
        yield from _of_server(args, [*common, "--store", f"{folder}/store"], pool, has_store=True)


def _of_server(
    args: argparse.Namespace, flags: list[str], pool: Sequence[Listed], *, has_store: bool
) -> Iterator[Outcome]:
    with ServerProcess(flags) as server:
        server.wait_until_ready()
        for number, concurrency in enumerate(args.concurrency):
            yield drive(
                server,
                pool,
                requests=args.requests,
                concurrency=concurrency,
                seed=args.seed + number,
                has_store=has_store,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and say whether all was well."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--heads", default=None, help="as for 'headrank serve'")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--collection", default="examples/collection", metavar="DIR")
    parser.add_argument("--requests", type=int, default=2000, help="per server and concurrency (default 2000)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lists", type=int, default=50, help="different lists in the pool (default 50)")
    parser.add_argument("--passages", type=int, default=20)
    parser.add_argument("--key-cache-mb", type=int, default=None)
    parser.add_argument("--without-store-only", action="store_true")
    parser.add_argument("--most-growth", type=float, default=0.03, help="share by which memory may grow (default 0.03)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="the numbers as JSON")
    args = parser.parse_args(argv)
    outcomes = []
    for outcome in run_all(args):
        print(outcome.line(), flush=True)
        for error in outcome.errors[:3]:
            print(f"  {error}", file=sys.stderr)
        outcomes.append(outcome)
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")
    return 0 if all(outcome.is_good(args.most_growth) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
