"""Needles and haystacks for NIAH, made in code or hidden between passages of a collection."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_PLACES = (
    "Arlen Bexham Cordova Dunmore Elstow Farrow Glenby Hartwell Ivybridge Jarrow Kelso Lindholm Marston Norwell "
    "Oakham Pelham"
).split()
_VERBS = "paint climb visit clean repair measure photograph follow".split()
_ADJECTIVES = "old green silver quiet broken wooden yellow narrow".split()
_OBJECTS = "bridge tower garden lantern harbour clock mill staircase".split()
_COMPANIONS = "violin teacher basket horse blanket camera sister kettle".split()
_SUBJECTS = (
    "The morning market",
    "The village council",
    "A local baker",
    "The ferry captain",
    "An early train",
    "The school choir",
)
_DEEDS = (
    "opened late",
    "sold fresh bread",
    "waited for the rain",
    "counted the boats",
    "moved to the main square",
    "kept careful notes",
)
_ENDINGS = (
    "because of the cold wind",
    "before the holiday",
    "as it did every year",
    "without telling anyone",
    "after a long debate",
)


@dataclass(frozen=True)
class Needle:
    """One trial: ``text`` holds ``sentence`` once, ``sentence`` holds ``answer``, and ``question`` asks for it."""

    text: str
    sentence: str
    answer: str
    question: str


def filler_sentences(rng: random.Random, count: int) -> list[str]:
    """Plain sentences that say nothing about any needle."""
    return [f"{rng.choice(_SUBJECTS)} {rng.choice(_DEEDS)} {rng.choice(_ENDINGS)}." for _ in range(count)]


def make_needles(
    count: int, *, haystack_words: int | Sequence[int], seed: int = 0, passages: Sequence[str] = ()
) -> list[Needle]:
    """``count`` trials with the needle at depths spread evenly over the haystack, from its beginning to its end.

    The haystack is ``haystack_words`` words of ``passages`` (drawn anew for each needle) or of generated sentences.
    Several lengths take turns, and the depths are spread over each length's own needles.
    """
    lengths = [haystack_words] if isinstance(haystack_words, int) else list(haystack_words)
    needles = []
    for index in range(count):
        place_of_length, length = divmod(index, len(lengths))
        trials = len(range(length, count, len(lengths)))  # of this length
        rng = random.Random(f"{seed}:needle:{index}")
        place = rng.choice(_PLACES)
        answer = (
            f"{rng.choice(_VERBS)} the {rng.choice(_ADJECTIVES)} {rng.choice(_OBJECTS)} with a "
            f"{rng.choice(_COMPANIONS)}"
        )
        sentence = f"The best thing to do in {place} is to {answer}."
        pieces = _haystack(rng, lengths[length], passages)
        position = round(len(pieces) * (place_of_length / max(trials - 1, 1)))
        text = " ".join([*pieces[:position], sentence, *pieces[position:]])
        needles.append(Needle(text, sentence, answer, f"What is the best thing to do in {place}?"))
    return needles


def _haystack(rng: random.Random, num_words: int, passages: Sequence[str]) -> list[str]:
    """Sentences or passages of about ``num_words`` words, cut at the end."""
    pieces: list[str] = []
    left = num_words
    drawn = list(passages)
    rng.shuffle(drawn)
    while left > 0:
        piece = drawn.pop() if drawn else filler_sentences(rng, 1)[0]
        words = piece.split()[:left]
        if words:
            pieces.append(" ".join(words))
        left -= len(words)
    return pieces
