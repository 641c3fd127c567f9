"""A reranked list and its first stage together: a weighted sum of scores that were standardised within the list.

Attention masses and BM25 scores have different units, and neither's zero means anything, so both are brought to mean 0 and deviation 1
over the candidates that were reranked. What lies beyond the depth keeps its place below them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrank.errors import InputError
from headrank.formats import Candidate, Run


def standardised(scores: Sequence[float]) -> np.ndarray:
    """Scores with mean 0 and (population) deviation 1; equal scores say nothing and become 0."""
    values = np.asarray(scores, np.float64)
    centred = values - values.mean()
    deviation = values.std()
    return np.zeros_like(values) if deviation <= 1e-12 * np.abs(values).max(initial=0.0) else centred / deviation


def fuse_list(first_stage: Sequence[Candidate], reranked: Sequence[Candidate], depth: int, weight: float) -> list[tuple[str, float]]:
    """One query's candidates, best first: ``weight`` on the reranker's scores, 1 - ``weight`` on the first stage's.

    Ties go to the first stage's order. A candidate of the top ``depth`` that the reranker lacks is an InputError.
    """
    top, rest = first_stage[:depth], first_stage[depth:]
    found = {candidate.doc_id: candidate.score for candidate in reranked}
    missing = [candidate.doc_id for candidate in top if candidate.doc_id not in found]
    if missing:
        raise InputError(
            f"candidate {missing[0]!r} of the first stage's top {depth} was not reranked; do both runs have the same candidates?"
        )
    scores = (1 - weight) * standardised([candidate.score for candidate in top]) + weight * standardised(
        [found[candidate.doc_id] for candidate in top]
    )
    order = sorted(range(len(top)), key=lambda place: (-scores[place], place))
    fused = [(top[place].doc_id, float(scores[place])) for place in order]
    floor = fused[-1][1]
    return fused + [(candidate.doc_id, floor - 1.0 - place) for place, candidate in enumerate(rest)]


def fuse_runs(first_stage: Run, reranked: Run, depth: int, weight: float) -> dict[str, list[tuple[str, float]]]:
    """Every query of the reranked run, fused with its first stage; a query that the first stage lacks is an InputError."""
    fused = {}
    for query_id, candidates in reranked.items():
        if query_id not in first_stage:
            raise InputError(f"query {query_id!r} has no candidates in the first stage; give the run that was reranked")
        try:
            fused[query_id] = fuse_list(first_stage[query_id], candidates, depth, weight)
        except InputError as error:
            raise InputError(f"query {query_id!r}: {error}") from None
    return fused
