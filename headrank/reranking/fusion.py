"""A reranked list and its first stage together: a weighted sum of scores that were standardised within the list.

Attention masses and BM25 scores have different units, and neither's zero means anything, so both are brought to mean 0
and deviation 1 over the candidates that were reranked. What lies beyond the depth keeps its place below them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrank.errors import InputError
from headrank.formats import Candidate, Run, append_unranked


def standardised(scores: Sequence[float]) -> np.ndarray:
    """Scores with mean 0 and (population) deviation 1; equal scores say nothing and become 0."""
    values = np.asarray(scores, np.float64)
    centred = values - values.mean()
    deviation = values.std()
    return np.zeros_like(values) if deviation <= 1e-12 * np.abs(values).max(initial=0.0) else centred / deviation


def fuse_list(
    first_stage: Sequence[Candidate], reranked: Sequence[Candidate], depth: int, weight: float
) -> list[tuple[str, float]]:
    """One query's candidates, best first: ``weight`` on the reranker's scores, 1 - ``weight`` on the first stage's.

    Ties go to the first stage's order. Runs of other candidates, or of another depth, are an InputError.
    """
    top, rest = first_stage[:depth], first_stage[depth:]
    found = {candidate.doc_id: candidate.score for candidate in reranked}
    _require_same_candidates(first_stage, found, depth)
    scores = (1 - weight) * standardised([candidate.score for candidate in top]) + weight * standardised(
        [found[candidate.doc_id] for candidate in top]
    )
    order = sorted(range(len(top)), key=lambda place: (-scores[place], place))
    fused = [(top[place].doc_id, float(scores[place])) for place in order]
    return append_unranked(fused, (candidate.doc_id for candidate in rest))


def _require_same_candidates(first_stage: Sequence[Candidate], found: Mapping[str, float], depth: int) -> None:
    """The reranker has scored the first stage's top ``depth``, put them above all others, and knows no other
    document.
    """
    top, rest = ([candidate.doc_id for candidate in part] for part in (first_stage[:depth], first_stage[depth:]))
    missing = [doc_id for doc_id in top if doc_id not in found]
    if missing:
        raise InputError(
            f"candidate {missing[0]!r} of the first stage's top {depth} was not reranked; do both runs have the "
            "same candidates?"
        )
    strangers = found.keys() - set(top) - set(rest)
    if strangers:
        raise InputError(f"document {min(strangers)!r} is not in the first stage; give the run that was reranked")
    floor = min(found[doc_id] for doc_id in top)
    above = [doc_id for doc_id in rest if found.get(doc_id, floor) > floor]
    if above:
        raise InputError(
            f"candidate {above[0]!r} was reranked and is not in the first stage's top {depth}; give the `depth` of "
            "the reranking"
        )


def _has_unread_end(first_stage: Sequence[Candidate], reranked: Sequence[Candidate], depth: int) -> bool:
    """Whether the last of the top ``depth`` has its place and not a score, as ``append_unranked`` gives it."""
    top = [candidate.doc_id for candidate in first_stage[:depth]]
    found = {candidate.doc_id: candidate.score for candidate in reranked}
    ordered = sorted((found[doc_id] for doc_id in top), reverse=True)
    steps = -np.diff(ordered)
    is_unit = np.isclose(steps, 1.0, rtol=0, atol=1e-6)
    return len(steps) > 1 and bool(is_unit[-1]) and not is_unit.all() and found[top[-1]] == ordered[-1]


def fuse_runs(first_stage: Run, reranked: Run, depth: int, weight: float) -> dict[str, list[tuple[str, float]]]:
    """Every query of the reranked run, fused with its first stage; a query that the first stage lacks is an
    InputError.
    """
    fused = {}
    for query_id, candidates in reranked.items():
        if query_id not in first_stage:
            raise InputError(f"query {query_id!r} has no candidates in the first stage; give the run that was reranked")
        try:
            fused[query_id] = fuse_list(first_stage[query_id], candidates, depth, weight)
        except InputError as error:
            raise InputError(f"query {query_id!r}: {error}") from None
    whole = [query_id for query_id in reranked if len(first_stage[query_id]) >= depth]
    if whole and all(_has_unread_end(first_stage[query_id], reranked[query_id], depth) for query_id in whole):
        raise InputError(f"the reranking was not as deep as {depth}; give its own `depth`")
    return fused
