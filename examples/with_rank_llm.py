"""A rank_llm Request in, a Result out: `python examples/with_rank_llm.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from rank_llm.data import Candidate, Query, Request

from headrank.integrations.rank_llm import HeadRankRequests

TEXTS = ["A violin has four strings.", "Rosin makes the bow grip the string.", "Violin concertos are long."]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    candidates = [Candidate(f"d{place}", 3.0 - place, {"text": text}) for place, text in enumerate(TEXTS)]
    # or rank_llm.data.read_requests_from_file(...)
    request = Request(Query("why does a violin bow need rosin", "1"), candidates)
    for candidate in HeadRankRequests(model, heads=heads).rerank(request).candidates:
        print(f"{candidate.score:+.4f}  {candidate.doc['text']}")
