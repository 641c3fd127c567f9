"""rank_llm: Requests in, Results out, as its Reranker gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrank.errors import InputError
from headrank.integrations import needs
from headrank.integrations.runs import shared_reranker
from headrank.integrations.shared_reranker import best_first, document_from
from headrank.reranking.rank_llm_format import text_of
from headrank.reranking.reranker import HeadRankReranker

with needs("rank-llm"):
    from rank_llm.data import Candidate, Request, Result


class HeadRankRequests:
    """``rerank`` and ``rerank_batch`` of rank_llm's Reranker; its read and write functions serve for files."""

    def __init__(
        self, model: str | HeadRankReranker = "embedded", *, heads: str | None = None, **settings: Any
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``, or a reranker that is loaded."""
        self.shared = shared_reranker(model, heads, **settings)

    def rerank(self, request: Request, rank_start: int = 0, rank_end: int = 100, **ignored: Any) -> Result:
        """One request, see ``rerank_batch``."""
        return self.rerank_batch([request], rank_start, rank_end, **ignored)[0]

    def rerank_batch(
        self, requests: Sequence[Request], rank_start: int = 0, rank_end: int = 100, **ignored: Any
    ) -> list[Result]:
        """The candidates from ``rank_start`` to ``rank_end`` in our order with our scores; those before and after keep
        their places.

        A request is not changed. Windows, strides and other settings of generating rerankers have no meaning here.
        """
        del ignored
        if not 0 <= rank_start < rank_end:
            raise InputError(f"`rank_start` {rank_start} and `rank_end` {rank_end} must be 0 <= rank_start < rank_end")
        lists = [
            (str(request.query.text), list(map(_document, request.candidates[rank_start:rank_end])))
            for request in requests
        ]
        return [_result(*item, rank_start) for item in zip(requests, self.shared.score_lists(lists), strict=True)]


def _document(candidate: Candidate) -> Any:
    text = text_of(candidate.doc)
    if text is None:
        raise InputError(
            f"candidate {candidate.docid!r} has no text; its 'doc' needs one of text, contents, content, segment, ..."
        )
    return document_from(text, candidate.doc)


def _result(request: Request, scores: Sequence[float], start: int) -> Result:
    """Scores fall from the first candidate to the last, also over those that were not read."""
    listed, ranked = request.candidates, best_first(scores)
    if not ranked:
        return Result(query=request.query, candidates=list(listed), invocations_history=[])
    best, worst = ranked[0][1], ranked[-1][1]
    scored = [(place, best + float(start - place)) for place in range(start)]
    scored += [(start + place, score) for place, score in ranked]
    scored += [
        (place, worst - float(number)) for number, place in enumerate(range(start + len(ranked), len(listed)), start=1)
    ]
    candidates = [Candidate(docid=listed[place].docid, score=score, doc=listed[place].doc) for place, score in scored]
    return Result(query=request.query, candidates=candidates, invocations_history=[])
