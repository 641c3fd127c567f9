"""A first stage and HeadRank in a PyTerrier experiment: `python examples/with_pyterrier.py [MODEL] [HEADS]`. Needs no
Java.

With an index the pipeline is `pt.terrier.Retriever(index) % 40 >> dataset.text_loader() >> HeadRankTransformer(model)`.
"""

from __future__ import annotations

import sys

import pandas as pd
import pyterrier as pt

from headrank.integrations.pyterrier import HeadRankTransformer

QUERY = "why does a violin bow need rosin"
TEXTS = ["A violin has four strings.", "Rosin makes the bow grip the string.", "Violin concertos are long."]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    topics = pd.DataFrame([{"qid": "1", "query": QUERY}])
    rows = [
        {"qid": "1", "query": QUERY, "docno": f"d{n}", "text": text, "score": 3.0 - n, "rank": n}
        for n, text in enumerate(TEXTS)
    ]
    first = pt.Transformer.from_df(pd.DataFrame(rows))
    pipeline = first % 3 >> HeadRankTransformer(model, heads=heads)
    for row in pipeline(topics).itertuples():
        print(f"{row.score:+.4f}  {row.text}")
    qrels = pd.DataFrame([{"qid": "1", "docno": "d1", "label": 1}])
    print(pt.Experiment([first, pipeline], topics, qrels, ["recip_rank"], names=["first stage", "headrank"]))
