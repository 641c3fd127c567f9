"""Two rules over places in a list that training, evaluation and head selection share: the middle zone, and NDCG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NDCG_DEPTH = 10


def middle_places(num_documents: int) -> slice:
    """The middle zone: places (from 0) between the 25th and 75th percentile of the retriever's order; ranks 11-30 of
    40, 6-15 of 20.
    """
    return slice(num_documents // 4, 3 * num_documents // 4)


def ndcg(scores: np.ndarray, grades: Sequence[int | None] | np.ndarray, depth: int = NDCG_DEPTH) -> np.ndarray:
    """NDCG with linear gains of ranking one list [N] by each row of ``scores`` [..., N]; the ideal is the list's own
    best order.

    Equal scores keep list order. Unjudged documents (None or below 0) gain nothing; a list without a relevant one gives
    0.
    """
    gains_N = np.array([max(grade or 0, 0) for grade in grades], np.float64)
    depth = min(depth, len(gains_N))
    discounts = 1.0 / np.log2(np.arange(2, depth + 2))
    ideal = float((np.sort(gains_N)[::-1][:depth] * discounts).sum())
    # stable: heads of an untrained model give many equal masses, and another order of them is another number
    order = np.argsort(-scores, axis=-1, kind="stable")
    found = (gains_N[order[..., :depth]] * discounts).sum(-1)
    return found / ideal if ideal > 0 else np.zeros_like(found)
