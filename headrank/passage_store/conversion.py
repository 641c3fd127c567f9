"""A smaller store from a larger one: fewer pairs, fewer bytes a number, pooled tokens, without computing a passage
again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrank.errors import InputError
from headrank.passage_store.header import KeyPair, StoreHeader
from headrank.passage_store.keys import StoredForm, measure_scales
from headrank.passage_store.store import Entry, PassageStore, create_store
from headrank.passage_store.survey import SAMPLE
from headrank.passage_store.writer import StoreWriter, recover_all, writing

_AT_A_TIME = 512  # passages between two commits
Passages = Iterable[tuple[bytes, Entry]]


def convert(
    source: PassageStore,
    folder: Path,
    pairs: Sequence[KeyPair] | None,
    dtype: str,
    pool: int,
    progress: Callable[[Passages, int], Passages] = lambda passages, total: passages,
) -> dict[str, int]:
    """Add every passage of ``source`` to the store in ``folder``, made if it is not there; goes on where a killed
    run stopped.
    """
    if source.header.pool != 1 or source.header.dtype == "int8":
        raise InputError(
            f"{source.folder}: only keys in bf16 or fp32 without pooling are converted; index again in one of these"
        )
    chosen = tuple(pairs) if pairs is not None else source.header.pairs
    source.header.check_serves(source.header.identity, chosen, source.folder)
    places, read = source.header.places(chosen), StoredForm(source.header.dtype, 1, source.scales)

    def keys_of(entry: Entry) -> torch.Tensor:
        return read.decode(entry.keys_ATD[places])

    with writing(folder):
        if (folder / "store.json").is_file():
            _check_same(StoreHeader.read(folder), source.header, chosen, dtype, pool, folder)
            recover_all(folder, StoreHeader.read(folder))
        else:
            _create(source, folder, chosen, dtype, pool, keys_of)
        store = PassageStore(folder)
        form = StoredForm(dtype, pool, store.scales)
        passages, added, saturated = iter(progress(_missing(source, store), len(source) - len(store))), 0, 0
        with StoreWriter(folder, store.header) as writer:
            while batch := list(itertools.islice(passages, _AT_A_TIME)):
                for digest, entry in batch:
                    stored, cut = form.encode(keys_of(entry))
                    writer.add(digest, stored, entry.num_tokens, is_shortened=entry.is_shortened, saturated=cut)
                    saturated += cut
                writer.commit()
                added += len(batch)
    return {"added": added, "present": len(store), "saturated": saturated}


def _create(
    source: PassageStore,
    folder: Path,
    pairs: tuple[KeyPair, ...],
    dtype: str,
    pool: int,
    keys_of: Callable[[Entry], torch.Tensor],
) -> None:
    """An empty store with scales measured on passages from all over the source."""
    places = [Entry(segment, number) for segment in source.segments for number in range(len(segment))]
    sample = [keys_of(entry) for entry in places[:: max(1, len(places) // SAMPLE)] if entry.num_keys]
    if not sample:
        raise InputError(f"{source.folder}: holds no keys to convert")
    scales = measure_scales(sample, pool)
    facts: dict[str, Any] = {"scales_measured_on": len(sample), "converted_from": source.header.dtype}
    header = dataclasses.replace(source.header, pairs=pairs, dtype=dtype, pool=pool, scales=scales.digest, facts=facts)
    create_store(folder, header, scales)


def _check_same(
    kept: StoreHeader, source: StoreHeader, pairs: Sequence[KeyPair], dtype: str, pool: int, folder: Path
) -> None:
    reason = kept.identity.difference(source.identity)
    for name, asked in (("pairs", tuple(pairs)), ("dtype", dtype), ("pool", pool)):
        if reason is None and getattr(kept, name) != asked:
            reason = f"it was made with other {name}"
    if reason is not None:
        raise InputError(f"{folder}: there is another store already: {reason}; choose another folder")


def _missing(source: PassageStore, store: PassageStore) -> Iterator[tuple[bytes, Entry]]:
    """The whole passages of the source that the store lacks, each once."""
    seen: set[bytes] = set()
    for segment in source.segments:
        firsts, seconds = (np.ascontiguousarray(segment.records[name]) for name in ("first", "second"))
        digests = [first + second for first, second in zip(_eights(firsts), _eights(seconds), strict=True)]
        for number, (digest, there) in enumerate(zip(digests, store.find(digests), strict=True)):
            if there is None and digest not in seen:
                seen.add(digest)
                segment.check([number])
                yield digest, Entry(segment, number)


def _eights(column: np.ndarray) -> list[bytes]:
    raw = column.tobytes()
    return [raw[start : start + 8] for start in range(0, len(raw), 8)]
