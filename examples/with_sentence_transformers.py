"""HeadRank where a CrossEncoder is expected: `python examples/with_sentence_transformers.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

from headrank.integrations.sentence_transformers import HeadRankCrossEncoder

QUERY = "why does a violin bow need rosin"
GOOD = "Rosin is rubbed on the hair of the bow so that it grips the string and sets it vibrating."
OTHERS = ["The four strings of a violin are tuned in fifths.", "Violin concertos of the romantic period are long."]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    encoder = HeadRankCrossEncoder(model, heads=heads)
    print(encoder.predict([(QUERY, text) for text in [GOOD, *OTHERS]]))
    for row in encoder.rank(QUERY, [*OTHERS, GOOD], return_documents=True):
        print(f"{row['score']:+.4f}  {row['text']}")
    print(CrossEncoderRerankingEvaluator([{"query": QUERY, "positive": [GOOD], "negative": OTHERS}])(encoder))
