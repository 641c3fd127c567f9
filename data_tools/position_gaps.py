"""Gaps between the documents of a training list: distances of a long prompt at the cost of a short one.

Trained on lists of a thousand tokens, a model ranks documents that are further from the query than that by their distance. So
the documents of a list may be moved apart: no token is added, only positions are left empty after documents, which rotary
embeddings turn into distance (the idea of positional skip-wise training, Zhu et al. 2023). The gaps of a list depend on its id and
its order alone, so the frozen model's cached scores were made with the same ones.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from headrank.method.spans import EncodedContext
from headrank.seeds import generator


def spread(encoded: EncodedContext, span: int, *key: str | int) -> EncodedContext:
    """The context with gaps after its documents, so that prefix and branch end anywhere up to ``span`` positions.

    The length is drawn evenly between that of the tokens and ``span``, its surplus is parted among the documents at random. ``key``
    decides the draw. A context that is longer than ``span`` stays as it is.
    """
    surplus = span - encoded.prefix_length - max(encoded.query_length, encoded.calibration_length)
    if surplus <= 0:
        return encoded
    rng = generator(0, "gaps", *key)
    total = int(rng.integers(surplus + 1))
    cuts = np.sort(rng.integers(total + 1, size=len(encoded.document_spans) - 1))
    gaps = np.diff(np.concatenate([[0], cuts, [total]]))
    return dataclasses.replace(encoded, position_gaps=tuple(int(gap) for gap in gaps))
