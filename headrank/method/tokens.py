"""Texts to token ids with character offsets, and queries checked and cleaned: the first step of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.files import quote
from headrank.method.prompt import neutralise


def require_offsets(tokenizer: Any) -> None:
    """Spans are found by character offsets, which only fast tokenizers give."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("the tokenizer has no offsets (it is not a fast tokenizer); convert it to tokenizer.json")


def tokenise(tokenizer: Any, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and character offsets [S, 2] of each text, without the special tokens that a tokenizer would add."""
    if not texts:
        return []
    try:
        encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    except TypeError as error:  # tokenizers' word for a str that is no text
        raise InputError(
            "half a surrogate pair (\\ud800 to \\udfff) in a query or document is not a character; repair the text"
        ) from error
    return [
        (np.asarray(ids, np.int32), np.asarray(offsets, np.int64).reshape(-1, 2))
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def cleaned_query(query: Any, special: Sequence[str]) -> str:
    """A query as it stands in the prompt: white space as single spaces, control tokens harmless; an empty one is
    refused.
    """
    if not isinstance(query, str):
        raise InputError(f"a query must be a string, found {type(query).__name__}: {quote(str(query))}")
    cleaned = neutralise(" ".join(query.split()), special)
    if not cleaned:
        raise InputError("empty query; give a query with at least one word")
    return cleaned
