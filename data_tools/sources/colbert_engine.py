"""ColBERTv2 candidates with sentence-transformers (extra 'colbert'): every passage encoded once, exact MaxSim over all
of them.

The multi-hop corpora have 6 to 12 thousand passages, so no index is needed. The original's (PLAID, residuals of 2 bits)
approximates these scores: the last digit of a recall may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data_tools.retrieve import RankedList, strictly_decreasing
from headrank.errors import InputError
from headrank.formats import Document

COLBERT_V2 = "colbert-ir/colbertv2.0"
_PASSAGES, _QUERIES = 256, 32  # of one product: bounded memory, whatever the corpus


def load_colbert(model: str, device: str | None = None) -> Any:
    """The encoder of a ColBERT checkpoint (a folder or a hub name)."""
    try:
        from sentence_transformers import MultiVectorEncoder
    except ImportError as error:
        raise InputError(
            "ColBERT candidates need sentence-transformers 6 or newer: pip install 'headrank[colbert]', or give a "
            "run file with `run`"
        ) from error
    try:
        return MultiVectorEncoder(model, device=device)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{model}: no ColBERT checkpoint can be loaded from there ({str(error).splitlines()[0]})"
        ) from error


def search_colbert(
    encoder: Any,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    top_k: int,
    watch: Callable[[Iterable[int]], Iterable[int]] = lambda starts: starts,
) -> dict[str, RankedList]:
    """The ``top_k`` passages of every query; ``watch`` sees the first passage of every block."""
    texts = [f"{document.title} {document.text}".replace("\n", " ").strip() for document in documents]
    asked = encoder.encode_query(list(queries.values()), show_progress_bar=False)
    scores_QN = np.empty((len(queries), len(documents)), np.float32)
    for first in watch(range(0, len(texts), _PASSAGES)):
        block = encoder.encode_document(texts[first : first + _PASSAGES], show_progress_bar=False)
        for start in range(0, len(queries), _QUERIES):
            found = encoder.similarity(asked[start : start + _QUERIES], block)
            scores_QN[start : start + _QUERIES, first : first + len(block)] = found.float().cpu().numpy()
    run = {}
    for query_id, scores_N in zip(queries, scores_QN, strict=True):
        best = np.argsort(-scores_N, kind="stable")[:top_k]  # equal scores in the corpus's order
        run[query_id] = strictly_decreasing([(documents[index].doc_id, float(scores_N[index])) for index in best])
    return run
