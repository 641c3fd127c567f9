"""Rerank a handful of passages with the embedded model: `python examples/quickstart.py [MODEL]`.

MODEL may be any Hugging Face decoder, or a directory written by `headrank export-hf`, which brings its own trained
heads. The embedded model brings fitted weights; of any other model all heads are read (the ICR baseline), so nothing
has to be trained first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrank import HeadRankReranker

PASSAGES = [
    "Rosin is rubbed on the hair of the bow so that it grips the string and sets it vibrating.",
    {"title": "Tuning", "text": "The four strings of a violin are tuned in fifths: G, D, A and E."},
    "A bow without any rosin slides over the strings and hardly makes a sound.",
    "Violin concertos of the romantic period are long and need great stamina.",
]


def main() -> None:
    """Print the passages, best first."""
    model = sys.argv[1] if len(sys.argv) > 1 else "embedded"
    brings_heads = model == "embedded" or (Path(model) / "headrank.json").is_file()
    reranker = HeadRankReranker.from_pretrained(model, heads=None if brings_heads else "all")
    for row in reranker.rank("why does a violin bow need rosin", PASSAGES, return_documents=True):
        text = row["text"] if isinstance(row["text"], str) else row["text"]["text"]
        print(f"{row['score']:+.4f}  {text}")


if __name__ == "__main__":
    main()
