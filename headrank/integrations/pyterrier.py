"""PyTerrier: a Transformer that reranks results with text, for ``bm25 >> headrank`` and ``pt.Experiment``. Needs no
Java itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.integrations import needs
from headrank.integrations.runs import shared_reranker
from headrank.integrations.shared_reranker import document_from
from headrank.reranking.reranker import HeadRankReranker

with needs("python-terrier"):
    import pandas as pd
    import pyterrier as pt


class HeadRankTransformer(pt.Transformer):
    """Gives qid, query, docno, text (and all other columns) new scores and ranks; ``bm25 % 40 >> headrank`` reranks
    the best 40.
    """

    def __init__(
        self,
        model: str | HeadRankReranker = "embedded",
        *,
        heads: str | None = None,
        text_field: str = "text",
        title_field: str | None = "title",
        **settings: Any,
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``; ``text_field`` and ``title_field`` name columns,
        the title's may lack.
        """
        super().__init__()
        self.shared = shared_reranker(model, heads, **settings)
        self.text_field, self.title_field = text_field, title_field

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """The rows of a query are one list, in the order of their ranks (or as they stand); best first in the
        result.
        """
        pt.validate.result_frame(inp, extra_columns=["query", self.text_field], context=self)
        results = inp.reset_index(drop=True)
        if "rank" in results.columns:
            results = results.sort_values(["qid", "rank"], kind="stable", ignore_index=True)
        scores = np.zeros(len(results))
        groups = [(queries, list(places)) for queries, places in self._lists(results)]
        texts = results[self.text_field].fillna("").tolist()
        titles = results[self.title_field].tolist() if self.title_field in results.columns else [None] * len(results)
        lists = [
            (query, [document_from(str(texts[place]), {"title": titles[place]}) for place in places])
            for query, places in groups
        ]
        for (_, places), found in zip(groups, self.shared.score_lists(lists), strict=True):
            scores[places] = found
        return pt.model.add_ranks(results.assign(score=scores)).sort_values(["qid", "rank"], ignore_index=True)

    @staticmethod
    def _lists(results: pd.DataFrame) -> Any:
        """(query, places of its rows) of every qid; a qid with two queries is a mistake."""
        for query_id, rows in results.groupby("qid", sort=False):
            queries = rows["query"].unique()
            if len(queries) > 1:
                raise InputError(
                    f"query {query_id!r} has two texts: {queries[0]!r} and {queries[1]!r}; give each its own qid"
                )
            yield queries[0], rows.index

    def __repr__(self) -> str:
        return f"HeadRankTransformer({self.shared.settings.model!r})"
