"""Contexts tokenised once and memory-mapped: the storage behind TrainingSet.

A cache is a folder of arrays named by a key that changes with the data, the tokenizer, the prompt, the truncation and the
document orders; array_folder.py builds and maps it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_tools.array_folder import Arrays, ArrayWriter, in_chunks, open_or_build
from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, iterate_contexts_with_pairs
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
    "grades": np.int32,  # [documents of all contexts], list order, -1 unjudged
    "teacher": np.float32,  # like grades: a teacher's raw scores, NaN where there is none
    "documents": np.int64,  # [C + 1] first document of each context
    "pairs": np.int32,  # [M, 2] (chosen, rejected) list indices
    "pair_starts": np.int64,  # [C + 1] first pair of each context
    "names": np.uint8,  # UTF-8 of context and query ids
    "name_ends": np.int64,  # [C, 2] end of context id and of query id in names
}
_ARRAYS = Arrays(_DTYPES, {"rows": 10, "spans": 2, "pairs": 2, "name_ends": 2})


def context_bytes(num_tokens: float, num_documents: float, num_pairs: float, name_bytes: float, num_orders: int = 1) -> float:
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


class TokenCache:
    """An opened cache; ``permutations`` are the ids whose rows it holds, in order. The arrays are those of _ARRAYS."""

    tokens: np.ndarray
    rows: np.ndarray
    spans: np.ndarray
    orders: np.ndarray
    grades: np.ndarray
    teacher: np.ndarray
    documents: np.ndarray
    pairs: np.ndarray
    pair_starts: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray

    def __init__(self, folder: Path, permutations: Sequence[int], *, is_parallel: bool = False) -> None:
        """Map the files of ``folder``; nothing is read until asked for. ``is_parallel`` is a switch of the prompt, as of all rows."""
        self.folder, self.permutations, self.is_parallel = folder, tuple(permutations), is_parallel
        for name, array in _ARRAYS.open(folder).items():
            setattr(self, name, array)
        self.num_contexts = len(self.documents) - 1

    def names_of(self, context: int) -> tuple[str, str]:
        """Context id and query id."""
        start = int(self.name_ends[context - 1, 1]) if context else 0
        middle, end = map(int, self.name_ends[context])
        return bytes(self.names[start:middle]).decode(), bytes(self.names[middle:end]).decode()

    def encoded(self, context: int, slot: int) -> tuple[EncodedContext, np.ndarray]:
        """The tokens of a context in its ``slot``-th order, and the list index at each prompt position [N]."""
        start, end, prefix, query, calibration, *rows, is_shortened = map(int, self.rows[context * len(self.permutations) + slot])
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

    def grades_of(self, context: int) -> np.ndarray:
        """Grades [N] in list order, -1 where unjudged."""
        first, stop = map(int, self.documents[context : context + 2])
        return np.array(self.grades[first:stop])

    def teacher_of(self, context: int) -> np.ndarray:
        """A teacher's raw scores float32 [N] in list order, NaN where it gave none."""
        first, stop = map(int, self.documents[context : context + 2])
        return np.array(self.teacher[first:stop])

    def pairs_of(self, context: int) -> np.ndarray:
        """Pairs [M, 2] of (chosen, rejected) list indices."""
        first, stop = map(int, self.pair_starts[context : context + 2])
        return np.array(self.pairs[first:stop])


def open_cache(directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int, cache: Path | None = None) -> TokenCache:
    """The cache of ``directory`` for this encoder and these orders, built first when it is not there, or an UnwritableCache."""
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
        "probe": [probe.input_ids.tolist(), probe.document_spans, probe.query_rows, probe.calibration_rows, probe.calibration_length],
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


def _write_rows(directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int, writer: ArrayWriter) -> None:
    tokens = documents = pairs = names = 0
    writer.append("documents", [0])
    writer.append("pair_starts", [0])
    for chunk in in_chunks(iterate_contexts_with_pairs(directory), max(1, _PROMPTS_PER_CALL // len(permutations))):
        orders = [
            [
                training_order(encoder.template, len(context.documents), seed=seed, list_id=context.context_id, number=number)
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
            writer.append("grades", [-1 if document.grade is None else document.grade for document in context.documents])
            scores = [document.teacher_score for document in context.documents]
            writer.append("teacher", [math.nan if score is None else score for score in scores])
            writer.append("pairs", chosen)
            context_name, query_name = context.context_id.encode(), context.query_id.encode()
            writer.append("names", np.frombuffer(context_name + query_name, np.uint8))
            writer.append("name_ends", [names + len(context_name), names + len(context_name) + len(query_name)])
            documents, pairs, names = documents + len(context.documents), pairs + len(chosen), names + len(context_name) + len(query_name)
            writer.append("documents", [documents])
            writer.append("pair_starts", [pairs])


def _row(encoded: EncodedContext, start: int) -> list[int]:
    lengths = [encoded.prefix_length, encoded.query_length, encoded.calibration_length]
    return [start, start + encoded.length, *lengths, *encoded.query_rows, *encoded.calibration_rows, int(encoded.is_shortened)]
