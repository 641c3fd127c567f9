"""An ir-measures run reranked and measured: `python examples/with_ir_measures.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

import ir_measures
from ir_measures import RR, Qrel, ScoredDoc

from headrank.integrations.ir_measures import rerank_run

QUERIES = {"1": "why does a violin bow need rosin"}
TEXTS = {
    "d1": "A violin has four strings.",
    "d2": "Rosin makes the bow grip the string.",
    "d3": "Violin concertos are long.",
}

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    # or ir_measures.read_trec_run("run.txt")
    bm25 = [ScoredDoc("1", "d1", 3.0), ScoredDoc("1", "d2", 2.0), ScoredDoc("1", "d3", 1.0)]
    reranked = rerank_run(bm25, QUERIES, TEXTS, model, heads=heads, depth=40)
    for name, run in (("BM25", bm25), ("HeadRank", reranked)):
        print(f"{ir_measures.calc_aggregate([RR], [Qrel('1', 'd2', 1)], run)[RR]:+.4f}  RR of {name}")
