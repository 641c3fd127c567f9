"""Evaluate HeadRank with MTEB on a collection folder: `python examples/with_mteb.py [MODEL] [HEADS] [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

import mteb

from headrank.integrations.mteb import HeadRankSearch, reranking_task

if __name__ == "__main__":
    default = ["embedded", "all", str(Path(__file__).parent / "collection")]
    model, heads, folder = [*sys.argv[1:], *default[len(sys.argv) - 1 :]]
    task = reranking_task(folder, name="ExampleReranking", depth=10)
    result = mteb.evaluate(HeadRankSearch(model, heads=heads), task, cache=None, co2_tracker=False)
    print(f"{result[0].get_score():+.4f}  NDCG@10 on {task.metadata.name}")
