"""ir-measures: scored documents in, scored documents out, from anything that it reads as a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ir_measures

from headrank.errors import InputError
from headrank.integrations.runs import Documents, RunScores, rerank_scores, shared_reranker
from headrank.reranking.reranker import HeadRankReranker


def rerank_run(
    run: Any,
    queries: Mapping[str, str],
    documents: Documents,
    model: str | HeadRankReranker = "embedded",
    *,
    depth: int | None = None,
    heads: str | None = None,
    **settings: Any,
) -> list[ir_measures.ScoredDoc]:
    """The run with the ``depth`` best candidates of every query reranked; those below keep their order.

    ``run`` is what ``ir_measures.calc_aggregate`` takes: ScoredDoc objects (also of ``read_trec_run``), a data frame
    with the columns query_id, doc_id and score, or a dictionary of dictionaries. ``documents`` maps a document id to
    its text, or is a function that does.
    """
    reranked = rerank_scores(shared_reranker(model, heads, **settings), _candidates(run), queries, documents, depth)
    return [
        ir_measures.ScoredDoc(query_id, doc_id, score)
        for query_id, scores in reranked.items()
        for doc_id, score in scores.items()
    ]


def _candidates(run: Any) -> RunScores:
    """Any form of a run as dictionaries."""
    if isinstance(run, Mapping):
        return {query_id: dict(scores) for query_id, scores in run.items()}
    rows: Iterable[Any] = run.itertuples() if hasattr(run, "itertuples") else run
    found: RunScores = {}
    for row in rows:
        try:
            found.setdefault(row.query_id, {})[row.doc_id] = float(row.score)
        except AttributeError as error:
            raise InputError(
                f"`run`: {str(row)[:60]!r} is no scored document; it needs query_id, doc_id and score"
            ) from error
    return found
