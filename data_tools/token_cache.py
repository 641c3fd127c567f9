"""Contexts tokenised once and memory-mapped: the storage behind TrainingSet.

A cache is a folder of arrays named by a key that changes with the data, the tokenizer, the prompt, the truncation and
the document orders; array_folder.py builds and maps it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_tools.array_folder import Arrays, ArrayWriter, in_chunks, open_or_build
from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, iterate_contexts_with_pairs
from data_tools.list_arrays import LIST_DTYPES, LIST_WIDTHS, ListArrays, ListWriter
from headrank.artifacts import content_digest, fingerprint
from headrank.errors import InputError
from headrank.method.late_prompt import LateEncoder
from headrank.method.ordering import training_order
from headrank.method.spans import EncodedContext, PromptEncoder

FORMAT = 2  # raise when the layout of the files changes
_PROMPTS_PER_CALL = 32  # offsets of a hundred documents are large Python lists: few prompts at a time
_DTYPES: dict[str, type] = {
    "tokens": np.int32,  # all rows one after another
    "rows": np.int64,  # [R, 10], see _row
    "spans": np.int32,  # [documents of all rows, 2], in prompt order
    "orders": np.int32,  # list index of the document at each prompt position, like spans
    **LIST_DTYPES,
}
_ARRAYS = Arrays(_DTYPES, {"rows": 10, "spans": 2, **LIST_WIDTHS})


def context_bytes(
    num_tokens: float, num_documents: float, num_pairs: float, name_bytes: float, num_orders: int = 1
) -> float:
    """Bytes of one context in a cache, the planner's estimate of a whole one; names are its context id and query id."""
    entries = {
        "tokens": num_orders * num_tokens,
        "rows": num_orders,
        "spans": num_orders * num_documents,
        "orders": num_orders * num_documents,
        "grades": num_documents,
        "teacher": num_documents,
        "documents": 1,
        "pairs": num_pairs,
        "pair_starts": 1,
        "names": name_bytes,
        "name_ends": 1,
    }
    return _ARRAYS.bytes_of(entries)


class TokenCache(ListArrays):
    """An opened cache; ``permutations`` are the ids whose rows it holds, in order. The arrays are those of _ARRAYS."""

    tokens: np.ndarray
    rows: np.ndarray
    spans: np.ndarray
    orders: np.ndarray

    def __init__(self, folder: Path, permutations: Sequence[int], *, is_parallel: bool = False) -> None:
        """Map the files of ``folder``. ``is_parallel`` is a switch of the prompt, as of all rows."""
        super().__init__(folder, _ARRAYS)
        self.permutations, self.is_parallel = tuple(permutations), is_parallel

    def encoded(self, context: int, slot: int) -> tuple[EncodedContext, np.ndarray]:
        """The tokens of a context in its ``slot``-th order, and the list index at each prompt position [N]."""
        start, end, prefix, query, calibration, *rows, is_shortened = map(
            int, self.rows[context * len(self.permutations) + slot]
        )
        first, stop = map(int, self.documents[context : context + 2])
        begin = first * len(self.permutations) + slot * (stop - first)
        spans = self.spans[begin : begin + stop - first]
        encoded = EncodedContext(
            input_ids=np.array(self.tokens[start:end]),
            prefix_length=prefix,
            query_length=query,
            calibration_length=calibration,
            query_rows=(rows[0], rows[1]),
            calibration_rows=(rows[2], rows[3]),
            document_spans=tuple((int(a), int(b)) for a, b in spans),
            is_shortened=bool(is_shortened),
            is_parallel=self.is_parallel,
        )
        return encoded, np.array(self.orders[begin : begin + stop - first])


def open_cache(
    directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int, cache: Path | None = None
) -> TokenCache:
    """The cache of ``directory`` for this encoder and these orders, built first when it is not there, or an
    UnwritableCache.
    """
    root = cache if cache is not None else directory / "cache"
    key = cache_key(directory, encoder, permutations, seed)
    write = partial(_write_rows, directory, encoder, permutations, seed)
    meta = {"format": FORMAT, "permutations": list(permutations)}
    folder = open_or_build(root, key, _ARRAYS, write, meta, directory)
    return TokenCache(folder, permutations, is_parallel=encoder.template.is_parallel)


def cache_key(directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int) -> str:
    """Sixteen hex digits over everything that decides the tokens."""
    probe = encoder.encode("which one?", [("A title", "The first text, with 1 number."), ("", "Second\ntext.")])
    parts = {
        "format": FORMAT,
        "contexts": file_digest(directory / CONTEXTS_FILE),
        "pairs": file_digest(directory / PAIRS_FILE),
        "tokenizer": tokenizer_digest(encoder),
        "frame": [encoder.frame.before, encoder.frame.after],
        "template": encoder.template.identity,
        "max_length": encoder.max_length,
        "probe": [
            probe.input_ids.tolist(),
            probe.document_spans,
            probe.query_rows,
            probe.calibration_rows,
            probe.calibration_length,
        ],
        "permutations": list(permutations),
        "permutation_seed": seed if any(permutations) else None,
    }
    return fingerprint(parts)


def file_digest(path: Path) -> str:
    """The digest of a whole training file; one that is not there is an InputError."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; make it with 'headrank pairs'")
    return content_digest(path)


def tokenizer_digest(encoder: PromptEncoder | LateEncoder) -> str:
    """The whole fast tokenizer without its truncation and padding, which calls change in passing."""
    state = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _write_rows(
    directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int, writer: ArrayWriter
) -> None:
    lists, tokens = ListWriter(writer), 0
    for chunk in in_chunks(iterate_contexts_with_pairs(directory), max(1, _PROMPTS_PER_CALL // len(permutations))):
        orders = [
            [
                training_order(
                    encoder.template, len(context.documents), seed=seed, list_id=context.context_id, number=number
                )
                for number in permutations
            ]
            for context, _ in chunk
        ]
        prompts = [
            (context.query, [(context.documents[i].title, context.documents[i].text) for i in order])
            for (context, _), listed in zip(chunk, orders, strict=True)
            for order in listed
        ]
        encoded = iter(encoder.encode_many(prompts))
        for (context, chosen), listed in zip(chunk, orders, strict=True):
            for order in listed:
                one = next(encoded)
                writer.append("tokens", one.input_ids)
                writer.append("rows", _row(one, tokens))
                writer.append("spans", one.document_spans)
                writer.append("orders", order)
                tokens += one.length
            lists.add(context, chosen)


def _row(encoded: EncodedContext, start: int) -> list[int]:
    lengths = [encoded.prefix_length, encoded.query_length, encoded.calibration_length]
    return [
        start,
        start + encoded.length,
        *lengths,
        *encoded.query_rows,
        *encoded.calibration_rows,
        int(encoded.is_shortened),
    ]
