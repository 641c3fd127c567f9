"""First-stage retrieval: BM25 over a corpus with bm25s, the embedded engine. Pyserini is in pyserini_engine.py.

Results are the same on every machine: scores are summed in the order of the query's terms, equal scores are ordered by
document id, and what is written strictly decreases, because trec_eval orders equal scores in its own way.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from data_tools.analysis import Analyser
from headrank.errors import InputError
from headrank.formats import Document

K1, B = 0.9, 0.4  # Anserini's defaults, with which the paper's BM25 rows were made
LARGEST_K1 = 1000  # far above any use; far larger ones overflow
RankedList = list[tuple[str, float]]  # (document id, score), best first


class Bm25Index:
    """An in-memory BM25 index (Lucene's variant) over title and text."""

    def __init__(self, documents: Iterable[Document], k1: float = K1, b: float = B) -> None:
        """Read and index the documents, one after another; their texts are not kept."""
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs its progress at any level
        if not (0 <= k1 <= LARGEST_K1 and 0 <= b <= 1):
            raise InputError(
                f"BM25 needs k1 between 0 and {LARGEST_K1} and b between 0 and 1, not k1 = {k1} and b = {b}"
            )
        self._analyse = Analyser()
        self._doc_ids: list[str] = []
        self._vocabulary: dict[str, int] = {}
        terms = []
        for document in documents:
            self._doc_ids.append(document.doc_id)
            found = self._analyse(f"{document.title} {document.text}")
            terms.append(array("i", [self._vocabulary.setdefault(term, len(self._vocabulary)) for term in found]))
        self._refuse_duplicates()
        # place of each document in the order of ids: decides between equal scores
        self._id_order = np.empty(len(self._doc_ids), np.int64)
        self._id_order[sorted(range(len(self._doc_ids)), key=self._doc_ids.__getitem__)] = np.arange(len(self._doc_ids))
        self._index = None
        if self._vocabulary:
            self._index = bm25s.BM25(method="lucene", k1=k1, b=b, backend="numpy")
            tokenised = bm25s.tokenization.Tokenized(ids=terms, vocab=dict(self._vocabulary))
            self._index.index(tokenised, create_empty_token=False, show_progress=False)

    def _refuse_duplicates(self) -> None:
        seen: set[str] = set()
        for doc_id in self._doc_ids:
            if doc_id in seen:
                raise InputError(f"document id {doc_id!r} appears twice in the corpus; remove one")
            seen.add(doc_id)

    def __len__(self) -> int:
        return len(self._doc_ids)

    def search(self, query: str, top_k: int) -> RankedList:
        """The best ``top_k`` documents that share a term with the query; none when no term is known."""
        terms = [self._vocabulary[term] for term in self._analyse(query) if term in self._vocabulary]
        if not terms or self._index is None:
            return []
        scores_N = self._index.get_scores_from_ids(terms)
        candidates = np.flatnonzero(scores_N > 0)
        if len(candidates) > top_k:
            threshold = np.partition(scores_N[candidates], -top_k)[-top_k]
            candidates = candidates[scores_N[candidates] >= threshold]  # more than top_k when the last place is shared
        best = candidates[np.lexsort((self._id_order[candidates], -scores_N[candidates]))][:top_k]
        return strictly_decreasing([(self._doc_ids[index], float(scores_N[index])) for index in best])


def strictly_decreasing(ranked: Sequence[tuple[str, float]]) -> RankedList:
    """The list with scores that float32 would call equal pulled apart by its smallest step, in the given order."""
    result: RankedList = []
    for doc_id, score in ranked:
        if result and np.float32(score) >= np.float32(result[-1][1]):
            score = float(np.nextafter(np.float32(result[-1][1]), np.float32(-np.inf)))
        result.append((doc_id, score))
    return result


def search_all(index: Bm25Index, queries: Mapping[str, str], top_k: int) -> dict[str, RankedList]:
    """Search every query; one without any hit is left out, as TREC runs do."""
    found = ((query_id, index.search(text, top_k)) for query_id, text in queries.items())
    return {query_id: ranked for query_id, ranked in found if ranked}
