"""Runs as dictionaries, {query id: {document id: score}}: the shape that BEIR, MTEB, ranx and ir-measures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrank.errors import InputError
from headrank.formats import append_unranked
from headrank.integrations.shared_reranker import RerankerSettings, SharedReranker, best_first
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

RunScores = dict[str, dict[str, float]]
Documents = Mapping[str, DocumentLike] | Callable[[str], DocumentLike]
_LISTS_AT_A_TIME = 64


def shared_reranker(model: str | HeadRankReranker, heads: str | None = None, **settings: Any) -> SharedReranker:
    """A reranker behind an adapter, from a model's name with the arguments of ``from_pretrained``, or one that is
    loaded.
    """
    if isinstance(model, HeadRankReranker):
        return SharedReranker(RerankerSettings(), model)
    return SharedReranker(RerankerSettings(model, heads, **settings))


def rerank_scores(
    shared: SharedReranker,
    run: Mapping[str, Mapping[str, float]],
    queries: Mapping[str, str],
    documents: Documents,
    depth: int | None = None,
    *,
    keep_rest: bool = True,
) -> RunScores:
    """New scores for the ``depth`` best candidates of every query, best first.

    Candidates below the depth follow in their old order (``keep_rest``) or are left out. A query or document without
    text is an InputError, and so is a depth below one.
    """
    if depth is not None and depth < 1:
        raise InputError(f"`depth` {depth} must be at least 1")
    candidates = {query_id: sorted(scores, key=lambda doc_id: -scores[doc_id]) for query_id, scores in run.items()}
    text_of = documents if callable(documents) else documents.__getitem__
    reranked: RunScores = {}
    ids = list(candidates)
    for start in range(0, len(ids), _LISTS_AT_A_TIME):
        part = ids[start : start + _LISTS_AT_A_TIME]
        lists = [
            (_text(queries, query_id), _texts(text_of, query_id, candidates[query_id][:depth])) for query_id in part
        ]
        for query_id, scores in zip(part, shared.score_lists(lists), strict=True):
            ranked = [(candidates[query_id][place], score) for place, score in best_first(scores)]
            rest = candidates[query_id][len(ranked) :] if keep_rest and ranked else ()
            reranked[query_id] = dict(append_unranked(ranked, rest) if ranked else ())
    return reranked


def _text(queries: Mapping[str, str], query_id: str) -> str:
    if query_id not in queries:
        raise InputError(f"`queries`: the run has query {query_id!r}, which is not there; give its text")
    return queries[query_id]


def _texts(text_of: Callable[[str], DocumentLike], query_id: str, doc_ids: Sequence[str]) -> list[DocumentLike]:
    try:
        return [text_of(doc_id) for doc_id in doc_ids]
    except KeyError as error:
        raise InputError(
            f"`documents`: query {query_id!r} has the candidate {error.args[0]!r}, which is not there; give its text"
        ) from error
