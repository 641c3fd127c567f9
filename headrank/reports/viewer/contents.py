"""What a view shows: the query, its passages in their new order, word values by head, ranks by every method, relevance.

Shapes: K heads (or layers), W words of a passage, Q words of the query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrank.formats import Document
from headrank.method.heads import Head, head_name
from headrank.reports.viewer.words import split_words, values_of_words

if TYPE_CHECKING:
    from headrank.reranking.explain import Explanation

MAX_HEADS = 64  # a set larger than this (ICR's) is shown by layer: the page would hold a million numbers
SHADE_FROM = 0.05  # words below a twentieth of the passage's maximum stay white, as in the paper's tables


@dataclass(frozen=True)
class Part:
    """One row of word values: a head, or a whole layer where the set is too large to show head by head."""

    layer: int
    name: str


@dataclass(frozen=True)
class Passage:
    """One document as shown."""

    doc_id: str
    text: str  # as it stood in the prompt
    title_length: int  # characters of ``text`` that are the title
    words: tuple[tuple[int, int], ...]
    values_KW: np.ndarray
    is_dropped_W: np.ndarray  # bool, all tokens of the word were dropped by the calibration
    scores_K: np.ndarray
    rank: int
    ranks: Mapping[str, int | None]  # method -> rank, None where its run lacks the document
    grade: int | None
    answers_QW: np.ndarray | None = None  # what each query word found in each word, over all heads; late readouts only

    @property
    def score(self) -> float:
        """The sum over parts: what the passage was ranked by."""
        return float(self.scores_K.sum())

    def shades(self) -> np.ndarray:
        """Word values [W] over all parts as fractions of the passage's maximum; negative ones are 0."""
        return shade(self.values_KW.sum(axis=0))


@dataclass(frozen=True)
class View:
    """Everything on the page."""

    query_id: str
    query: str
    model: str
    method: str  # name for people of the ranking that is shaded
    parts: tuple[Part, ...]
    passages: tuple[Passage, ...]  # best first
    methods: tuple[str, ...]  # the other rankings, in column order
    relevant_from: int = 1
    # in the order of the passages' answers_QW; empty where it is not known which word found what
    query_words: tuple[str, ...] = ()
    note: str = ""


def shade(values_W: np.ndarray) -> np.ndarray:
    """Values as fractions of the largest; negative values and a list without a positive one become 0."""
    highest = float(values_W.max(initial=0.0))
    return np.clip(values_W, 0.0, None) / highest if highest > 0 else np.zeros_like(values_W)


def build_view(
    scores: Explanation,
    documents: Sequence[Document],
    *,
    query_id: str,
    query: str,
    model: str,
    method: str,
    ranks: Mapping[str, Mapping[str, int]],
    grades: Mapping[str, int] | None,
    title_lengths: Sequence[int],
    note: str = "",
) -> View:
    """Put a view together from a reranker's detailed scores of ``documents`` (same order); ties keep the given order.

    ``ranks`` maps a method to document id -> rank; ``grades`` is None when nobody judged the query.
    """
    parts, part_of_head = _parts(scores.heads)
    order = sorted(range(len(documents)), key=lambda index: (-float(scores.scores[index]), index))
    passages = []
    for rank, index in enumerate(order, start=1):
        tokens, document = scores.tokens[index], documents[index]
        values = np.concatenate(
            [_gathered(tokens.per_head, part_of_head, len(parts)), tokens.is_kept[None].astype(np.float64)]
        )
        words, values_KW = values_of_words(tokens.text, tokens.offsets, values)
        passages.append(
            Passage(
                doc_id=document.doc_id,
                text=tokens.text,
                title_length=min(title_lengths[index], len(tokens.text)),
                words=tuple(words),
                values_KW=values_KW[:-1],
                is_dropped_W=values_KW[-1] == 0,
                scores_K=_gathered(scores.per_head[:, index, None], part_of_head, len(parts))[:, 0],
                rank=rank,
                ranks={name: listed.get(document.doc_id) for name, listed in ranks.items()},
                grade=None if grades is None else grades.get(document.doc_id),
                answers_QW=_answers(scores, index),
            )
        )
    spans = split_words(scores.query) if scores.query_offsets is not None else []
    asked = tuple(scores.query[begin:end] for begin, end in spans)
    return View(query_id, query, model, method, parts, tuple(passages), tuple(ranks), note=note, query_words=asked)


def _answers(scores: Explanation, index: int) -> np.ndarray | None:
    """What each word of the query found in each word of a passage, summed over heads: adds up to the passage's
    score.
    """
    tokens = scores.tokens[index]
    if tokens.matches is None or scores.query_offsets is None:
        return None
    _, by_token_RW = values_of_words(tokens.text, tokens.offsets, tokens.matches.sum(0))
    return values_of_words(scores.query, scores.query_offsets, by_token_RW.T)[1].T


def _parts(heads: Sequence[Head]) -> tuple[tuple[Part, ...], list[int]]:
    """The rows to show and, for each head, its row."""
    if len(heads) <= MAX_HEADS:
        return tuple(Part(head[0], head_name(head)) for head in heads), list(range(len(heads)))
    layers = sorted({layer for layer, _ in heads})
    return tuple(Part(layer, f"layer {layer}") for layer in layers), [layers.index(layer) for layer, _ in heads]


def _gathered(values: np.ndarray, part_of_head: Sequence[int], num_parts: int) -> np.ndarray:
    """Sum rows [K, ...] into their parts."""
    gathered = np.zeros((num_parts, *values.shape[1:]), dtype=np.float64)
    np.add.at(gathered, np.asarray(part_of_head), values)
    return gathered
