"""HeadRank through the `rerankers` package: `python examples/with_rerankers.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from rerankers import Reranker

import headrank.integrations.rerankers  # noqa: F401 - makes HeadRankRanker known

QUERY = "why does a violin bow need rosin"
TEXTS = [
    "The four strings of a violin are tuned in fifths.",
    "Rosin is rubbed on the hair of the bow so that it grips the string.",
    "Violin concertos of the romantic period are long.",
]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    ranker = Reranker(model, model_type="HeadRankRanker", heads=heads, verbose=0)
    for result in ranker.rank(QUERY, TEXTS, doc_ids=["tuning", "rosin", "concertos"]).top_k(2):
        print(f"{result.score:+.4f}  {result.doc_id}  {result.text}")
