"""BEIR's dictionaries through HeadRank: `python examples/with_beir.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from headrank.integrations.beir import HeadRankRerank

CORPUS = {
    "d1": {"title": "Violins", "text": "A violin has four strings."},
    "d2": {"title": "", "text": "Rosin makes the bow grip the string."},
    "d3": {"title": "", "text": "Violin concertos are long."},
}
QUERIES = {"1": "why does a violin bow need rosin"}
RESULTS = {"1": {"d1": 3.0, "d2": 2.0, "d3": 1.0}}  # of a retriever, as EvaluateRetrieval.retrieve gives them

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    reranked = HeadRankRerank(model, heads=heads).rerank(CORPUS, QUERIES, RESULTS, top_k=100)
    for doc_id, score in reranked["1"].items():
        print(f"{score:+.4f}  {CORPUS[doc_id]['text']}")
