"""ranx: a Run in, a Run out, ready for ``evaluate``, ``compare`` and ``fuse``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrank.integrations import needs
from headrank.integrations.runs import Documents, rerank_scores, shared_reranker
from headrank.reranking.reranker import HeadRankReranker

with needs("ranx"):
    from ranx import Run


def rerank_run(
    run: Run,
    queries: Mapping[str, str],
    documents: Documents,
    model: str | HeadRankReranker = "embedded",
    *,
    depth: int | None = None,
    name: str = "headrank",
    heads: str | None = None,
    **settings: Any,
) -> Run:
    """The run with the ``depth`` best candidates of every query reranked; those below keep their order.

    ``documents`` maps a document id to its text (or {"title", "text"}), or is a function that does. Other settings are
    those of ``HeadRankReranker.from_pretrained``.
    """
    candidates = {query_id: dict(scores) for query_id, scores in run.to_dict().items()}
    shared = shared_reranker(model, heads, **settings)
    return Run(rerank_scores(shared, candidates, queries, documents, depth), name=name)
