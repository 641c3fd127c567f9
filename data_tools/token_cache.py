"""Contexts tokenised once and memory-mapped: the storage behind TrainingSet.

A cache is a folder named by a key that changes with the data, the tokenizer, the prompt, the truncation and the document
orders. It is built in a temporary folder under a lock and renamed into place, so processes that start together build
it once and none sees half of it. Arrays are flat files, opened as maps: a million contexts cost address space, not memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, iterate_contexts_with_pairs
from headrank.errors import InputError
from headrank.formats import read_json
from headrank.method.ordering import training_order
from headrank.method.spans import EncodedContext, PromptEncoder

logger = logging.getLogger(__name__)

FORMAT = 2  # raise when the layout of the files changes
_PROMPTS_PER_CALL = 32  # offsets of a hundred documents are large Python lists: few prompts at a time
_ARRAYS = {
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
_WIDTHS = {"rows": 10, "spans": 2, "pairs": 2, "name_ends": 2}


class UnwritableCache(InputError):
    """A token cache is not there yet and cannot be written where it belongs; another place may do."""


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
    return sum(count * _WIDTHS.get(name, 1) * np.dtype(_ARRAYS[name]).itemsize for name, count in entries.items())


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
        for name, dtype in _ARRAYS.items():
            setattr(self, name, _open_array(folder / f"{name}.bin", dtype, _WIDTHS.get(name)))
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
    folder = root / key
    try:
        if not folder.is_dir():
            _build_once(directory, folder, encoder, permutations, seed)
    except OSError as error:
        raise UnwritableCache(
            f"{root}: the token cache cannot be written ({error.strerror or error}); make room or make the folder writable"
        ) from error
    meta = read_json(folder / "meta.json")
    if not isinstance(meta, dict) or meta.get("key") != key:
        raise InputError(f"{folder}: the token cache does not belong to its name; delete the folder")
    return TokenCache(folder, permutations, is_parallel=encoder.template.is_parallel)


def cache_key(directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int) -> str:
    """Sixteen hex digits over everything that decides the tokens."""
    probe = encoder.encode("which one?", [("A title", "The first text, with 1 number."), ("", "Second\ntext.")])
    parts = {
        "format": FORMAT,
        "contexts": _file_digest(directory / CONTEXTS_FILE),
        "pairs": _file_digest(directory / PAIRS_FILE),
        "tokenizer": tokenizer_digest(encoder),
        "frame": [encoder.frame.before, encoder.frame.after],
        "template": encoder.template.identity,
        "max_length": encoder.max_length,
        "probe": [probe.input_ids.tolist(), probe.document_spans, probe.query_rows, probe.calibration_rows, probe.calibration_length],
        "permutations": list(permutations),
        "permutation_seed": seed if any(permutations) else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path}: no such file; make it with 'headrank pairs'")
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tokenizer_digest(encoder: PromptEncoder) -> str:
    """The whole fast tokenizer without its truncation and padding, which calls change in passing."""
    state = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _open_array(path: Path, dtype: type, width: int | None) -> np.ndarray:
    shape = (-1,) if width is None else (-1, width)
    if path.stat().st_size == 0:
        return np.empty(0, dtype).reshape(shape if width is None else (0, width))
    return np.memmap(path, dtype, mode="r").reshape(shape)


def _build_once(directory: Path, folder: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int) -> None:
    """Build the cache under a lock, unless another process does."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            logger.info("tokenising %s into %s", directory, folder)
            _build(directory, folder, encoder, permutations, seed)


def _build(directory: Path, folder: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int) -> None:
    """Write the cache beside ``folder`` and rename it; an interrupted build leaves nothing under the final name."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with contextlib.ExitStack() as files:
            writers = {name: files.enter_context(open(temporary / f"{name}.bin", "wb")) for name in _ARRAYS}
            _write_rows(directory, encoder, permutations, seed, writers)
        meta = {"key": folder.name, "format": FORMAT, "permutations": list(permutations)}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        os.chmod(temporary, 0o755)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another machine was first: its cache is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_rows(directory: Path, encoder: PromptEncoder, permutations: Sequence[int], seed: int, writers: dict) -> None:
    tokens = documents = pairs = names = 0
    _write(writers, "documents", [0])
    _write(writers, "pair_starts", [0])
    for chunk in _chunks(iterate_contexts_with_pairs(directory), max(1, _PROMPTS_PER_CALL // len(permutations))):
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
                _write(writers, "tokens", one.input_ids)
                _write(writers, "rows", _row(one, tokens))
                _write(writers, "spans", one.document_spans)
                _write(writers, "orders", order)
                tokens += one.length
            _write(writers, "grades", [-1 if document.grade is None else document.grade for document in context.documents])
            scores = [document.teacher_score for document in context.documents]
            _write(writers, "teacher", [math.nan if score is None else score for score in scores])
            _write(writers, "pairs", chosen)
            context_name, query_name = context.context_id.encode(), context.query_id.encode()
            writers["names"].write(context_name + query_name)
            _write(writers, "name_ends", [names + len(context_name), names + len(context_name) + len(query_name)])
            documents, pairs, names = documents + len(context.documents), pairs + len(chosen), names + len(context_name) + len(query_name)
            _write(writers, "documents", [documents])
            _write(writers, "pair_starts", [pairs])


def _row(encoded: EncodedContext, start: int) -> list[int]:
    lengths = [encoded.prefix_length, encoded.query_length, encoded.calibration_length]
    return [start, start + encoded.length, *lengths, *encoded.query_rows, *encoded.calibration_rows, int(encoded.is_shortened)]


def _write(writers: dict, name: str, values: object) -> None:
    writers[name].write(np.ascontiguousarray(values, _ARRAYS[name]).tobytes())


def _chunks(items: Iterator, size: int) -> Iterator[list]:
    chunk: list = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
