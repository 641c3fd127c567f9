"""Which sentences of a document the score came from: the token values of the explanation, added up sentence by
sentence.

The values of all sentences of a passage add up to its score (as far as the calibration kept its tokens). ``share`` is a
sentence's part of the positive ones, and pruning keeps the sentences with at least the mean share: what a generator
needs of the passage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrank.reranking.explain import TokenScores
from headrank.serving.call import Json

_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")
_SHORTEST = 3  # characters; less is joined to the sentence before, as in "e.g."


@dataclass(frozen=True)
class Sentence:
    """Characters [start, end) of the text as the model read it, and what they gave to the score."""

    text: str
    start: int
    end: int
    score: float
    share: float
    is_kept: bool

    def to_json(self) -> Json:
        """For an answer."""
        numbers: Json = {"score": round(self.score, 6), "share": round(self.share, 4), "is_kept": self.is_kept}
        return {"text": self.text, "start": self.start, "end": self.end, **numbers}


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Sentences without the space around them; together they hold every character that is not a space."""
    spans: list[tuple[int, int]] = []
    start = 0
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        piece = text[start:end]
        left, right = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
        start = end
        if right <= left:
            continue
        if spans and right - left < _SHORTEST:
            spans[-1] = (spans[-1][0], right)
        else:
            spans.append((left, right))
    return spans


def sentences_of(tokens: TokenScores) -> list[Sentence]:
    """The sentences of one passage in order, with their scores."""
    spans = sentence_spans(tokens.text)
    if not spans:
        return []
    values_T = (tokens.per_head * tokens.is_kept[None]).sum(0)
    starts = np.array([start for start, _ in spans])
    sums = np.zeros(len(spans))
    for (begin, end), value in zip(tokens.offsets, values_T, strict=True):
        middle = (int(begin) + int(end)) / 2
        sums[max(0, int(np.searchsorted(starts, middle, side="right")) - 1)] += value
    return _with_shares(tokens.text, spans, sums)


def _with_shares(text: str, spans: Sequence[tuple[int, int]], sums: np.ndarray) -> list[Sentence]:
    positive = np.clip(sums, 0.0, None)
    total = float(positive.sum())
    shares = positive / total if total > 0 else np.zeros(len(spans))
    least = 1.0 / len(spans) if total > 0 else 0.0
    best = int(np.argmax(sums))
    return [
        Sentence(text[start:end], start, end, float(score), float(share), bool(share >= least or index == best))
        for index, ((start, end), score, share) in enumerate(zip(spans, sums, shares, strict=True))
    ]


def pruned_text(sentences: Sequence[Sentence]) -> str:
    """The sentences that are kept, in their order."""
    return " ".join(sentence.text for sentence in sentences if sentence.is_kept)
