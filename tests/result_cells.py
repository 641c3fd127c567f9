"""A directory of synthetic cells made by code: several models, methods and benchmarks with plausible scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrank.evaluation.measures import evaluate_run
from headrank.experiments.cells import RUN, SCORES
from headrank.experiments.metrics_file import write_metrics
from headrank.formats import Candidate, Qrels, Run, write_jsonl, write_run
from headrank.method.heads import HeadSet

# method -> (how much of the score is relevance, seconds a query)
METHODS = {"bm25": (0.0, 0.001), "icr": (0.2, 2.0), "core": (0.6, 1.5), "headrank": (1.4, 1.0)}


def make_cell(
    root: Path,
    model: str,
    method: str,
    benchmark: str,
    *,
    depth: int = 20,
    queries: int = 12,
    order: str = "retriever",
    **facts: Any,
) -> Path:
    """One cell whose scores mix relevance (by method), position and noise; relevance depends on the benchmark only."""
    folder = root / benchmark / f"d{depth}-{order}" / (model or "first-stage") / (method + str(facts.get("seed", "")))
    folder.mkdir(parents=True)
    truth = np.random.default_rng(sum(benchmark.encode()))
    noise = np.random.default_rng(sum((model + method + benchmark + order + str(facts.get("seed", ""))).encode()))
    signal, seconds = METHODS[method.partition("+")[0]]
    rows, run, qrels = [], {}, {}
    for number in range(1, queries + 1):
        query_id, ranks = f"q{number}", np.arange(1, depth + 1)
        grades = (truth.random(depth) < 0.45 - 0.3 * ranks / depth).astype(int) * truth.integers(1, 4, depth)
        scores = (
            signal * grades + noise.normal(0, 0.6, depth) + 1.2 * np.exp(-ranks / 4)
            if method != "bm25"
            else -ranks.astype(float)
        )
        doc_ids = [f"{benchmark}-{number}-{rank}" for rank in ranks]
        rows.append(
            {
                "query_id": query_id,
                "doc_ids": doc_ids,
                "scores": scores.tolist(),
                "ranks": ranks.tolist(),
                "seconds": seconds,
                "tokens": 1500,
            }
        )
        run[query_id] = sorted(zip(doc_ids, scores.tolist(), strict=True), key=lambda pair: -pair[1])
        qrels[query_id] = {doc_id: int(grade) for doc_id, grade in zip(doc_ids, grades, strict=True)}
    write_run(folder / RUN, run, method)
    write_jsonl(folder / SCORES, rows)
    loaded: Run = {
        query: [Candidate(doc, place, score) for place, (doc, score) in enumerate(pairs, 1)]
        for query, pairs in run.items()
    }
    complete = {
        "model": model or None,
        "method": method,
        "depth": depth,
        "order": order,
        "seconds_per_query": seconds,
        "tokens_per_query": 1500.0,
        "peak_memory_bytes": 900 * 2**20,
        "layers_used": None if method == "bm25" else 17,
        "num_layers": None if method == "bm25" else 28,
        "prompt_hash": "0123456789ab",
        "versions": {"headrank": "0", "torch": "2"},
        "command": ["rerank", "--method", method],
        **facts,
    }
    write_metrics(folder / RUN, complete, evaluate_run(loaded, qrels, ["nDCG@10", "R@5"]), _as_qrels(qrels), benchmark)
    return folder


def _as_qrels(qrels: dict[str, dict[str, int]]) -> Qrels:
    return qrels


def make_matrix(
    root: Path,
    models: tuple[str, ...] = ("Qwen3-0.6B",),
    benchmarks: tuple[str, ...] = ("dl19", "nfcorpus", "nq"),
    **facts: Any,
) -> Path:
    """Every method on every model and benchmark, first stage once a benchmark."""
    for benchmark in benchmarks:
        make_cell(root, "", "bm25", benchmark, **facts)
        for model in models:
            for method in METHODS:
                if method != "bm25":
                    make_cell(root, model, method, benchmark, **facts)
    return root


def make_heads(
    *heads: tuple[int, int],
    method: str = "entropy",
    model: str = "models/tiny",
    num_layers: int = 28,
    num_heads: int = 16,
) -> HeadSet:
    """A head set with a full table, the given heads on top."""
    rest = [(layer, head) for layer in range(num_layers) for head in range(num_heads) if (layer, head) not in heads]
    table = [
        {
            "rank": rank,
            "name": f"L{layer}-H{head}",
            "layer": layer,
            "head": head,
            "is_chosen": rank <= len(heads),
            "s_disc": 1 / rank,
            "phi": 0.9 / rank,
        }
        for rank, (layer, head) in enumerate([*heads, *rest], start=1)
    ]
    return HeadSet(heads, method, model, num_layers, num_heads, table=tuple(table))
