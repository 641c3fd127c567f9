"""'headrank index --ray': keys computed by the processes of a Ray cluster, written by this one.

A store has one writer, so a process that dies leaves nothing half-written and every passage comes once; the disk of the
store need not be shared. What is missing of the corpus passes through this process's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrank.integrations.ray_data import connect, find_workers
from headrank.passage_store.indexing import Elsewhere, Passage, StoredKeys, stored_keys
from headrank.passage_store.keys import StoredForm
from headrank.passage_store.segment import NUMPY_TYPE

import pyarrow  # isort: skip - after ray_data, which says how to install it
import ray

if TYPE_CHECKING:
    from headrank.reranking.late_reader import LateReader

_PASSAGES_AT_A_TIME = 128  # at most
MakeReader = Callable[[str], "LateReader"]  # from a device


def keys_from_ray(
    make_reader: MakeReader, device: str | None, address: str | None = None, workers: int | None = None
) -> Elsewhere:
    """Join or start the cluster now; passages are computed when they are given. ``make_reader`` is called in every
    process.
    """
    connect(address, workers)
    found = find_workers(device, workers)

    def compute(passages: Iterable[Passage], form: StoredForm) -> Iterator[StoredKeys]:
        packed = [{"title": title, "text": text} for title, text in passages]
        size = max(1, min(_PASSAGES_AT_A_TIME, len(packed) // (4 * found.count)))
        dataset = ray.data.from_items(packed, override_num_blocks=-(-len(packed) // size))
        pool = dataclasses.replace(found, count=min(found.count, -(-len(packed) // size)))
        numbers = NUMPY_TYPE[form.dtype]
        for row in pool.map(dataset, _KeyMaker, make_reader, pool.device, form).iter_rows():
            keys = np.frombuffer(row["keys"], numbers).reshape(row["shape"])
            yield row["digest"], keys, row["num_tokens"], row["is_shortened"], row["saturated"]

    return compute


class _KeyMaker:
    """One process: the model, and the form in which the store keeps its keys."""

    def __init__(self, make_reader: MakeReader, device: str, form: StoredForm) -> None:
        self.late, self.form = make_reader(device), form

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """A row for every passage, as the writer wants it."""
        passages = list(zip(rows["title"].to_pylist(), rows["text"].to_pylist(), strict=True))
        return pyarrow.Table.from_pylist(
            [
                {
                    "digest": digest,
                    "keys": np.ascontiguousarray(keys).tobytes(),
                    "shape": list(keys.shape),
                    "num_tokens": num_tokens,
                    "is_shortened": bool(is_shortened),
                    "saturated": saturated,
                }
                for digest, keys, num_tokens, is_shortened, saturated in stored_keys(self.late, self.form, passages)
            ]
        )
