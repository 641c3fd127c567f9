"""Documents longer than the model reads at once: cut to a number of tokens, split into chunks, scored by the best
chunk.

A document that fits is passed on untouched, so that its score is the offline one. A longer one is split where a
sentence ends, or at least a word; each chunk carries the title. With ``max_chunks`` 1 nothing is split: the model reads
the beginning, as offline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Passage = tuple[str, str]  # (title, text)
Offsets = Callable[[Sequence[str]], list[np.ndarray]]  # texts -> characters [T, 2] of their tokens
_SPARE = 4  # tokens: a chunk alone may be tokenised a little longer than inside its document
_LEAST = 16  # tokens of a chunk, whatever the title takes
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)\]]*\s+|\n+|[。！？]")
_SEARCHED = 0.4  # the last part of a chunk in which a sentence's end is looked for


@dataclass(frozen=True)
class ChunkLimits:
    """What one request allows. ``room`` is the tokens of a passage that the model reads (None: no bound of its own)."""

    room: int | None
    max_words: int
    max_tokens: int | None = None  # of a whole document
    max_chunks: int = 1
    keeps_end: bool = False  # what does not fit is cut at the beginning


@dataclass(frozen=True)
class Chunk:
    """A passage to score: characters [start, end) of a document's text."""

    document: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunked:
    """All chunks of a list in order, and which documents lost text."""

    passages: tuple[Passage, ...]
    chunks: tuple[Chunk, ...]
    is_cut: tuple[bool, ...]


def chunk_documents(documents: Sequence[Passage], limits: ChunkLimits, offsets_of: Offsets) -> Chunked:
    """Split a list; ``offsets_of`` is called only when something might not fit."""
    long = [index for index, document in enumerate(documents) if not surely_fits(document, limits)]
    found = dict(zip(long, offsets_of([documents[index][1] for index in long]), strict=True)) if long else {}
    titles = dict(zip(long, map(len, offsets_of([documents[index][0] for index in long])), strict=True)) if long else {}
    passages: list[Passage] = []
    chunks: list[Chunk] = []
    is_cut = []
    for index, (title, text) in enumerate(documents):
        spans, was_cut = [(0, len(text))], False
        if index in found:
            spans, was_cut = _spans(text, found[index], titles[index], limits)
        passages += [(title, text[start:end]) for start, end in spans]
        chunks += [Chunk(index, start, end) for start, end in spans]
        is_cut.append(was_cut)
    return Chunked(tuple(passages), tuple(chunks), tuple(is_cut))


def surely_fits(document: Passage, limits: ChunkLimits) -> bool:
    """Whether a document fits without counting its tokens: a token has at least one byte."""
    title, text = document
    # no tokenizer makes more tokens than bytes: most documents are let through without being tokenised
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    fits_tokens = limits.max_tokens is None or num_bytes <= limits.max_tokens
    fits_room = limits.room is None or num_bytes + len(title.encode("utf-8", "surrogatepass")) + _SPARE <= limits.room
    return fits_tokens and fits_room and (num_bytes < 2 * limits.max_words or len(text.split()) <= limits.max_words)


def _spans(
    text: str, offsets: np.ndarray, num_title_tokens: int, limits: ChunkLimits
) -> tuple[list[tuple[int, int]], bool]:
    """The characters of each chunk of one text, and whether some are in none."""
    first, last, is_cut = 0, len(offsets), False
    if limits.max_tokens is not None and last > limits.max_tokens:
        is_cut = True
        first, last = (last - limits.max_tokens, last) if limits.keeps_end else (0, limits.max_tokens)
    begin = int(offsets[first][0]) if first else 0
    end = int(offsets[last - 1][1]) if last < len(offsets) else len(text)
    room = None if limits.room is None else max(_LEAST, limits.room - num_title_tokens - _SPARE)
    if fits_as_it_is(text[begin:end], last - first, room, limits.max_words):
        return [(begin, end)], is_cut
    if limits.max_chunks == 1 and not limits.keeps_end:
        return [(begin, end)], True
    spans = _split(text, offsets, (first, last), (begin, end), room, limits.max_words)
    if len(spans) > limits.max_chunks:
        is_cut = True
        spans = spans[-limits.max_chunks :] if limits.keeps_end else spans[: limits.max_chunks]
    return spans, is_cut


def fits_as_it_is(text: str, num_tokens: int, room: int | None, max_words: int) -> bool:
    """Whether the model reads all of a text."""
    return (room is None or num_tokens <= room) and len(text.split()) <= max_words


def _split(
    text: str,
    offsets: np.ndarray,
    tokens: tuple[int, int],
    characters: tuple[int, int],
    room: int | None,
    max_words: int,
) -> list[tuple[int, int]]:
    """Chunks one after another, each as long as it may be and then back to the end of a sentence or a word."""
    (first, last), (begin, end) = tokens, characters
    starts = offsets[:, 0]
    words = np.array([match.start() for match in re.finditer(r"\S+", text[begin:end])]) + begin
    spans = []
    while begin < end:
        token = max(first, int(np.searchsorted(starts, begin)))
        # by the document's own tokens: a chunk is cut where a token ends
        limit = end if room is None or token + room >= last else int(offsets[token + room - 1][1])
        word = int(np.searchsorted(words, begin))
        if word + max_words < len(words):
            limit = min(limit, int(words[word + max_words]))
        stop = end if limit >= end else _boundary(text, begin, limit)
        if text[begin:stop].strip():
            spans.append((begin, stop))
        begin = stop
    return spans or [characters]


def _boundary(text: str, begin: int, limit: int) -> int:
    """The last sentence end before ``limit``, else the last space, else ``limit``; always beyond ``begin``."""
    searched = max(begin + 1, limit - int(_SEARCHED * (limit - begin)))
    ends = [match.end() for match in _SENTENCE_END.finditer(text, searched, limit)]
    if ends:
        return ends[-1]
    space = max(text.rfind(" ", begin + 1, limit), text.rfind("\n", begin + 1, limit))
    # always forward: text without a space would be split into nothing for ever
    return space + 1 if space > begin else max(limit, begin + 1)


def best_chunks(scores: Sequence[float], chunked: Chunked) -> list[int]:
    """For each document the index of its chunk with the highest score; the earlier one of equals."""
    best: dict[int, int] = {}
    for place, chunk in enumerate(chunked.chunks):
        # the first of equal chunks: an answer must not depend on the order of a dictionary
        if chunk.document not in best or scores[place] > scores[best[chunk.document]]:
            best[chunk.document] = place
    return [best[index] for index in range(len(chunked.is_cut))]
