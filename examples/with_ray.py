"""Score a Ray dataset of lists: `python examples/with_ray.py [MODEL] [HEADS]`. Real ones come from
ray.data.read_parquet("...").
"""

from __future__ import annotations

import sys

import ray

from headrank.integrations.ray_data import connect, score_lists

LISTS = [
    {
        "query": "why does a violin bow need rosin",
        "documents": ["A violin has four strings.", "Rosin makes the bow grip the string."],
    },
    {"query": "how long do fleas live", "documents": ["Fleas live two to three months.", "Rosin is made from resin."]},
]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    connect(workers=2)
    for row in score_lists(ray.data.from_items(LISTS), model, heads=heads).take_all():
        for score, text in zip(row["scores"], row["documents"], strict=True):
            print(f"{score:+.4f}  {text}")
