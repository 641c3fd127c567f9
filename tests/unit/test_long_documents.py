"""Chunks of long documents: nothing lost, nothing twice, room respected, and what fits is not touched."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrank.serving.long_documents import Chunk, Chunked, ChunkLimits, best_chunks, chunk_documents, surely_fits
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = (
    "The flea lives long. It needs a warm host! Does it? Concrete floors cost six dollars. Rosin grips the bow of a "
    "violin."
)


def offsets_of(texts: Sequence[str]) -> list[np.ndarray]:
    found = TOKENIZER(list(texts), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [np.asarray(offsets, np.int64).reshape(-1, 2) for offsets in found]


def num_tokens(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def never(texts: Sequence[str]) -> list[np.ndarray]:
    raise AssertionError("a text that surely fits was tokenised")


def test_what_fits_is_not_touched_and_not_even_tokenised() -> None:
    chunked = chunk_documents([("T", "short"), ("", "")], ChunkLimits(room=100, max_words=50, max_chunks=4), never)
    assert chunked == Chunked((("T", "short"), ("", "")), (Chunk(0, 0, 5), Chunk(1, 0, 0)), (False, False))


def test_a_text_of_many_bytes_that_fits_in_tokens_is_not_touched() -> None:
    limits = ChunkLimits(room=num_tokens(TEXT) + 4, max_words=50, max_chunks=4)
    assert not surely_fits(("", TEXT), limits)
    assert chunk_documents([("", TEXT)], limits, offsets_of).passages == (("", TEXT),)


def test_chunks_end_where_sentences_end_and_carry_the_title() -> None:
    limits = ChunkLimits(room=None, max_words=9, max_chunks=9)
    chunked = chunk_documents([("Fleas", TEXT)], limits, offsets_of)
    assert chunked.passages == (
        ("Fleas", "The flea lives long. It needs a warm host! "),
        ("Fleas", "Does it? Concrete floors cost six dollars. "),
        ("Fleas", "Rosin grips the bow of a violin."),
    )
    assert chunked.is_cut == (False,)


def test_one_chunk_is_the_beginning_as_offline_and_says_that_it_was_cut() -> None:
    chunked = chunk_documents([("", TEXT), ("", "short")], ChunkLimits(room=20, max_words=50), offsets_of)
    assert chunked.passages == (("", TEXT), ("", "short")), "the model's own cut is applied, the offline one"
    assert chunked.is_cut == (True, False)


def test_more_chunks_than_allowed_are_cut_at_the_chosen_end() -> None:
    limits = ChunkLimits(room=None, max_words=9, max_chunks=2)
    first, last = (
        chunk_documents([("", TEXT)], ChunkLimits(limits.room, 9, None, 2, keeps_end), offsets_of)
        for keeps_end in (False, True)
    )
    assert first.is_cut == last.is_cut == (True,)
    assert first.passages[0][1].startswith("The flea") and last.passages[-1][1].endswith("violin.")
    assert len(first.passages) == len(last.passages) == 2


@pytest.mark.parametrize("keeps_end", [False, True])
def test_a_cap_of_tokens_keeps_that_many(keeps_end: bool) -> None:
    limits = ChunkLimits(room=500, max_words=300, max_tokens=12, max_chunks=4, keeps_end=keeps_end)
    chunked = chunk_documents([("", TEXT), ("", "a flea")], limits, offsets_of)
    kept = chunked.passages[0][1]
    offsets = offsets_of([TEXT])[0]
    expected = TEXT[int(offsets[-12][0]) :] if keeps_end else TEXT[: int(offsets[11][1])]
    assert kept == expected and chunked.is_cut == (True, False)


texts = st.lists(
    st.sampled_from(["flea", "the", "host.", "six dollars!", "\n\n", "violin?", "  ", "é", "長い文。", "x" * 30]),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(words=texts, room=st.integers(24, 60), max_words=st.integers(3, 30))
def test_chunks_cover_every_word_once_and_respect_room_and_words(words: list[str], room: int, max_words: int) -> None:
    text = " ".join(words)
    chunked = chunk_documents([("", text)], ChunkLimits(room, max_words, None, 1000), offsets_of)
    assert "".join("".join(passage.split()) for _, passage in chunked.passages) == "".join(text.split())
    assert chunked.is_cut == (False,)
    assert all(
        text[chunk.start : chunk.end] == passage
        for chunk, (_, passage) in zip(chunked.chunks, chunked.passages, strict=True)
    )
    for _, passage in chunked.passages:
        assert len(passage.split()) <= max_words and num_tokens(passage) <= room


def test_the_best_chunk_is_the_documents_and_the_earlier_of_equals() -> None:
    chunks = tuple(Chunk(document, 0, 1) for document in (0, 0, 1, 2, 2))
    chunked = Chunked((("", "x"),) * 5, chunks, (False,) * 3)
    assert best_chunks([1.0, 3.0, -1.0, 2.0, 2.0], chunked) == [1, 2, 3]


def test_a_chunks_words_are_never_split_where_there_is_a_space() -> None:
    text = "word " * 200
    chunked = chunk_documents([("", text)], ChunkLimits(30, 300, None, 100), offsets_of)
    assert all(re.fullmatch(r"(word ?)+", passage) for _, passage in chunked.passages)
