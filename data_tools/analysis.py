"""English text analysis as Lucene does it: word boundaries, possessives, lower case, stop words, Porter stems.

Anserini's default chain, so that bm25s ranks nearly as Pyserini does. Word boundaries follow the Unicode rules that
Lucene's StandardTokenizer follows, for alphabetic scripts: a point or apostrophe between letters and a point or comma
between digits do not split ("U.S", "don't", "1,000"), a hyphen does.
"""

from __future__ import annotations

import re
from functools import lru_cache

STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such
    that the their then there these they this to was will with""".split()
)
_WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
_POSSESSIVES = ("'s", "'S", "’s", "’S")


class Analyser:
    """Turns text into index terms; an object a process, because it remembers the terms it has seen."""

    def __init__(self) -> None:
        import Stemmer

        self._stem = Stemmer.Stemmer("porter").stemWord
        self._term = lru_cache(maxsize=1 << 20)(self._make_term)

    def __call__(self, text: str) -> list[str]:
        """The terms of a text in order, repeats included."""
        return [term for term in map(self._term, _WORD.findall(text)) if term]

    def _make_term(self, word: str) -> str:
        """One word's term, or nothing for a stop word."""
        if word.endswith(_POSSESSIVES):
            word = word[:-2]
        word = word.lower()
        return "" if word in STOP_WORDS else self._stem(word)
