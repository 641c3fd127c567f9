"""English text analysis as Lucene does it: word boundaries, possessives, lower case, stop words, Porter stems.

Anserini's default chain, so that bm25s ranks nearly as Pyserini does. Word boundaries follow the Unicode rules that
Lucene's StandardTokenizer follows: a point or apostrophe between letters and a point or comma between digits do not
split ("U.S", "don't", "1,000"), a hyphen does, an ideograph stands alone.
"""

from __future__ import annotations

import re
from functools import lru_cache

STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such
    that the their then there these they this to was will with""".split()
)
_WORD = re.compile(
    r"[\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff©®™]"
    r"|\w+(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*"
)
_POSSESSIVES = ("'s", "'S", "’s", "’S")
_VOWEL_THEN_CONSONANT = re.compile(r"(?:[aeiou]|(?<=[^aeiou])y)(?:[^aeiouy]|(?<=[aeiou])y)")  # Porter's measure m > 0


class Analyser:
    """Turns text into index terms; it remembers the terms of the words it has seen."""

    def __init__(self) -> None:
        import Stemmer

        self._stemmer = Stemmer.Stemmer("porter")
        self._term = lru_cache(maxsize=1 << 20)(self._make_term)

    def __call__(self, text: str) -> list[str]:
        """The terms of a text in order, repeats included."""
        return [term for term in map(self._term, _WORD.findall(text)) if term]

    def _make_term(self, word: str) -> str:
        """One word's term, or nothing for a stop word."""
        if word.endswith(_POSSESSIVES):
            word = word[:-2]
        word = word.lower()
        return "" if word in STOP_WORDS or not word.strip("_") else self._stem(word)

    def _stem(self, word: str) -> str:
        """Porter's stem with the three departures that his own later code and Lucene's have.

        Words of one or two letters stay; -logi loses its i (etiology); -bli becomes -ble before the last steps
        (possibly).
        """
        if len(word) <= 2:
            return word
        stem = self._stemmer.stemWord(word)
        if stem.endswith("logi") and _VOWEL_THEN_CONSONANT.search(stem[:-4]):
            return stem[:-1]
        if stem.endswith("bli") and _VOWEL_THEN_CONSONANT.search(stem[:-3]):
            return self._stemmer.stemWord(stem[:-1] + "e")
        return stem
