"""Everything that made up the scores of one list: per document, per head and per token.

Shapes: K heads, N documents, S tokens of the prompt, T tokens of one document, R tokens of the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrank.method.heads import Head
from headrank.method.spans import EncodedContext
from headrank.reranking.rerank_requests import ListScores


@dataclass(frozen=True)
class TokenScores:
    """One document's tokens: text as in the prompt, character ranges, and values per core head before summing."""

    text: str
    offsets: np.ndarray  # [T, 2]
    per_head: np.ndarray  # float32 [K, T], calibrated (or raw without calibration)
    is_kept: np.ndarray  # bool [T], False where the calibration dropped the token
    # float32 [K, R, T] in the late layout: what each query token found; adds up to ``per_head``
    matches: np.ndarray | None = None


@dataclass(frozen=True)
class Explanation:
    """Everything that made up the scores of one list, documents in the order they were given."""

    scores: np.ndarray  # [N]
    per_head: np.ndarray  # [K, N]: sums to ``scores`` over K
    heads: tuple[Head, ...]  # the K heads, in the rows' order
    tokens: tuple[TokenScores, ...]
    num_tokens: int
    is_shortened: bool
    query: str = ""  # as it was read, in the late layout
    query_offsets: np.ndarray | None = None  # [R, 2] characters within ``query``


def explain_list(
    context: EncodedContext,
    finished: ListScores,
    heads_by_layer: Sequence[tuple[int, Sequence[int]]],
    values_KS: np.ndarray,
    kept_S: np.ndarray,
    per_head_KN: np.ndarray,
) -> Explanation:
    """The numbers of a prompt, put back into the order in which the documents were given."""
    places = [position - 1 for position in finished.positions]
    tokens = []
    for place in places:
        first, last = context.document_spans[place]
        text, offsets = context.document_texts[place], context.token_offsets[place]
        tokens.append(TokenScores(text, offsets, values_KS[:, first:last], kept_S[first:last]))
    heads = tuple((layer, head) for layer, layer_heads in heads_by_layer for head in layer_heads)
    return Explanation(
        finished.scores, per_head_KN[:, places], heads, tuple(tokens), context.length, context.is_shortened
    )
