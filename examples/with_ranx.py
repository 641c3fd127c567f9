"""A ranx Run reranked and compared: `python examples/with_ranx.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from ranx import Qrels, Run, evaluate

from headrank.integrations.ranx import rerank_run

QUERIES = {"1": "why does a violin bow need rosin"}
TEXTS = {
    "d1": "A violin has four strings.",
    "d2": "Rosin makes the bow grip the string.",
    "d3": "Violin concertos are long.",
}

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    bm25 = Run({"1": {"d1": 3.0, "d2": 2.0, "d3": 1.0}}, name="BM25")
    reranked = rerank_run(bm25, QUERIES, TEXTS, model, heads=heads, depth=40)
    for run in (bm25, reranked):
        print(f"{evaluate(Qrels({'1': {'d2': 1}}), run, 'mrr'):+.4f}  MRR of {run.name}")
