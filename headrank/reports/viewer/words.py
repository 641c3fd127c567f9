"""From sub-word tokens to the words people read: split the text, and give each word the attention of its tokens.

Shapes: K heads, T tokens, W words.
"""

from __future__ import annotations

import functools
import re
import unicodedata

import numpy as np

_WITHOUT_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    """One character of a script written without spaces; a word with its inner apostrophes, hyphens and points; a run of
    signs.

    Marks (accents, vowel signs) and joiners belong to the letter before them; Python's \\w does not count them as
    letters.
    """
    marks = (
        "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char).startswith("M"))
        + "\u200c\u200d"
    )
    letter, inner = rf"[^\W{_WITHOUT_SPACES}][{marks}]*", rf"[^\W_][{marks}]*"
    return re.compile(rf"[{_WITHOUT_SPACES}][{marks}]*|(?:{letter})+(?:['’\-.](?:{inner})+)*|[^\w\s]+|_")


def split_words(text: str) -> list[tuple[int, int]]:
    """Character ranges of the words of a text: every character that is not a space is in exactly one of them."""
    return [match.span() for match in _word_pattern().finditer(text)]


def values_of_words(text: str, offsets: np.ndarray, values_KT: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Word ranges and values [K, W]: a token's value is shared among its words by the characters it has in each.

    A token of nothing but spaces belongs to the word after it (or the last one), so the sum over words is the sum over
    tokens. A text without any word gives no values.
    """
    words = split_words(text)
    values_KW = np.zeros((values_KT.shape[0], len(words)), dtype=np.float64)
    if not words:
        return words, values_KW
    word_of_character = np.full(len(text) + 1, -1)
    for index, (begin, end) in enumerate(words):
        word_of_character[begin:end] = index
    starts = np.array([begin for begin, _ in words])
    for token, (begin, end) in enumerate(offsets):
        owners = word_of_character[begin:end]
        owners = owners[owners >= 0]
        if len(owners) == 0:
            owners = np.array([min(int(np.searchsorted(starts, begin)), len(words) - 1)])
        found, counts = np.unique(owners, return_counts=True)
        values_KW[:, found] += values_KT[:, token, None] * (counts / counts.sum())
    return words, values_KW
