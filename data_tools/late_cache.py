"""Lists of the late layout tokenised once: every different passage once, every context's query, memory-mapped.

A passage's tokens depend on its text and the prompt alone, so a passage that stands in many lists is stored once. While
a cache is built a table of digests (some hundred bytes per passage) is in memory; reading needs none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_tools.array_folder import Arrays, ArrayWriter, in_chunks, open_or_build
from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, Context, iterate_contexts_with_pairs
from data_tools.list_arrays import LIST_DTYPES, LIST_WIDTHS, ListArrays, ListWriter
from data_tools.token_cache import file_digest, tokenizer_digest
from headrank.artifacts import fingerprint
from headrank.method.late_prompt import EncodedPassage, EncodedQuery, LateEncoder

FORMAT = 1  # raise when the layout of the files changes
_CONTEXTS_PER_CALL = 64
_ARRAYS = Arrays(
    {
        "passage_tokens": np.int32,  # all passages one after another
        "passage_ends": np.int64,  # [P]
        "digests": np.uint64,  # [P] of the tokens: equal passages of different caches have equal ones
        "is_shortened": np.uint8,  # [P]
        "query_tokens": np.int32,  # all query branches one after another
        "queries": np.int64,  # [C, 2] end of the branch's tokens, its first row
        "members": np.int64,  # like grades: the passage of each document
        **LIST_DTYPES,
    },
    {"queries": 2, **LIST_WIDTHS},
)


class LateCache(ListArrays):
    """An opened cache; the arrays are those of _ARRAYS."""

    passage_tokens: np.ndarray
    passage_ends: np.ndarray
    digests: np.ndarray
    is_shortened: np.ndarray
    query_tokens: np.ndarray
    queries: np.ndarray
    members: np.ndarray

    def __init__(self, folder: Path) -> None:
        """Map the files of ``folder``."""
        super().__init__(folder, _ARRAYS)

    def query_of(self, context: int) -> EncodedQuery:
        """The query branch."""
        start = int(self.queries[context - 1, 0]) if context else 0
        end, first_row = map(int, self.queries[context])
        return EncodedQuery(np.array(self.query_tokens[start:end]), first_row)

    def passage(self, number: int) -> EncodedPassage:
        """One passage by its number in ``members``."""
        start = int(self.passage_ends[number - 1]) if number else 0
        return EncodedPassage(
            np.array(self.passage_tokens[start : int(self.passage_ends[number])]), bool(self.is_shortened[number])
        )

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of passages by their numbers."""
        return self.passage_ends[numbers] - np.where(numbers > 0, self.passage_ends[np.maximum(numbers - 1, 0)], 0)

    def members_of(self, context: int) -> np.ndarray:
        """The passages [N] of a context in list order."""
        return np.array(self.members[self.documents_of(context)])


def open_late_cache(directory: Path, encoder: LateEncoder, cache: Path | None = None) -> LateCache:
    """The cache of ``directory`` for this encoder, built first when it is not there, or an UnwritableCache."""
    root = cache if cache is not None else directory / "cache"
    write = partial(_write_contexts, directory, encoder)
    meta = {"format": FORMAT, "layout": "late"}
    return LateCache(open_or_build(root, late_cache_key(directory, encoder), _ARRAYS, write, meta, directory))


def late_cache_key(directory: Path, encoder: LateEncoder) -> str:
    """Sixteen hex digits over everything that decides the tokens."""
    probe = (
        encoder.encode_query("which one?"),
        encoder.encode_passages([("A title", "The first text, with 1 number.")])[0],
    )
    parts = {
        "format": FORMAT,
        "contexts": file_digest(directory / CONTEXTS_FILE),
        "pairs": file_digest(directory / PAIRS_FILE),
        "tokenizer": tokenizer_digest(encoder),
        "template": encoder.template.identity,
        "max_length": encoder.max_length,
        "probe": [
            encoder.opening_ids.tolist(),
            probe[0].input_ids.tolist(),
            probe[0].first_row,
            probe[1].input_ids.tolist(),
        ],
    }
    return fingerprint(parts)


def token_digest(tokens: np.ndarray) -> int:
    """A 64-bit number of some tokens."""
    return int.from_bytes(
        hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=8).digest(), "little"
    )


def _write_contexts(directory: Path, encoder: LateEncoder, writer: ArrayWriter) -> None:
    known: dict[bytes, int] = {}  # digest of title and text -> passage
    ends = dict.fromkeys(("passages", "queries"), 0)
    lists = ListWriter(writer)
    for chunk in in_chunks(iterate_contexts_with_pairs(directory), _CONTEXTS_PER_CALL):
        members = _add_passages([context for context, _ in chunk], encoder, writer, known, ends)
        for (context, chosen), listed in zip(chunk, members, strict=True):
            query = encoder.encode_query(context.query)
            ends["queries"] += len(query.input_ids)
            writer.append("query_tokens", query.input_ids)
            writer.append("queries", [ends["queries"], query.first_row])
            writer.append("members", listed)
            lists.add(context, chosen)


def _add_passages(
    contexts: Sequence[Context],
    encoder: LateEncoder,
    writer: ArrayWriter,
    known: dict[bytes, int],
    ends: dict[str, int],
) -> list[list[int]]:
    """Write the passages that are new and return the passage number of every document."""
    members, new = [], []
    for context in contexts:
        listed = []
        for document in context.documents:
            text = json.dumps([document.title, document.text]).encode()
            digest = hashlib.blake2b(text, digest_size=16).digest()
            if digest not in known:
                known[digest] = len(known)
                new.append((document.title, document.text))
            listed.append(known[digest])
        members.append(listed)
    for passage in encoder.encode_passages(new):
        ends["passages"] += len(passage.input_ids)
        writer.append("passage_tokens", passage.input_ids)
        writer.append("passage_ends", [ends["passages"]])
        writer.append("digests", [token_digest(passage.input_ids)])
        writer.append("is_shortened", [passage.is_shortened])
    return members
