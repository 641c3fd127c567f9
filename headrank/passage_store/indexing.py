"""Filling a store: every passage of a corpus that is not there yet, computed in batches and committed as it goes.

A killed run goes on where it stopped. Under torchrun the passages are shared by their digests, and every process writes
segments of its own; readers see one store.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrank.errors import InputError
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import KeyIdentity, KeyPair, StoreHeader
from headrank.passage_store.keys import StoredForm, measure_scales
from headrank.passage_store.store import BYTES_PER_RECORD, PassageStore, Scales, create_store
from headrank.passage_store.survey import Survey, survey
from headrank.passage_store.writer import StoreWriter, recover_all, writing
from headrank.torchrun import barrier, first_process_does, world

if TYPE_CHECKING:
    from headrank.reranking.late_reader import LateReader

_log = logging.getLogger(__name__)
_AT_A_TIME = 512  # passages between two commits
Passage = tuple[str, str]
# digest, numbers [A, T / P, D], tokens, is shortened, numbers cut
StoredKeys = tuple[bytes, np.ndarray, int, bool, int]
Corpus = Callable[[], Iterable[Passage]]  # read twice: once to see what is missing, once to compute it
# other processes that compute (integrations/ray_index.py)
Elsewhere = Callable[[Iterable[Passage], StoredForm], Iterable[StoredKeys]]


@dataclass(frozen=True)
class IndexSettings:
    """How a new store keeps keys; None for a store that is there takes its own."""

    dtype: str | None = None
    pool: int | None = None
    default_dtype: str = "int8"


def index_corpus(
    folder: Path,
    late: LateReader,
    corpus: Corpus,
    settings: IndexSettings,
    *,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda passages, total: passages,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Any]:
    """Add what is missing of a corpus, making the store if need be; what was done, for a closing line.

    ``elsewhere`` computes the keys in other processes; they are written here.
    """
    rank, world_size = world()
    with contextlib.ExitStack() as lock:
        found = first_process_does(lambda: _prepare(folder, late, corpus, settings, lock, world_size))
        total = found.num_missing if found is not None else 0
        if found is not None and not total:
            barrier(world_size, last=True)
            return {"added": 0, "present": found.num_present, "saturated": 0, "seconds": 0.0}
        result = _share(folder, late, corpus, rank, world_size, progress, total, elsewhere)
    return result if found is None else result | {"present": found.num_present}


def _prepare(
    folder: Path, late: LateReader, corpus: Corpus, settings: IndexSettings, lock: contextlib.ExitStack, world_size: int
) -> Survey:
    """The first process's part: take the lock, make the store if need be, see what is missing, say what it will
    cost.
    """
    lock.enter_context(writing(folder))
    header = _existing(folder, late, settings)
    if header is not None:
        recover_all(folder, header)
    found = survey(corpus(), PassageStore(folder) if header is not None else None)
    if header is not None and not found.num_missing:
        return found
    if not found.sample:
        raise InputError(f"{folder}: no passages to index; the corpus is empty")
    seconds_per_token, sample = _measure(late, found.sample)
    scales = None
    if header is None:
        header, scales = _new_header(late, settings, sample)
    _say_and_check_size(folder, header, found, sample, seconds_per_token / world_size)
    if scales is not None:
        create_store(folder, header, scales)
    return found


def _existing(folder: Path, late: LateReader, settings: IndexSettings) -> StoreHeader | None:
    """The header of a store that can take this model's keys at exactly its pairs; None where there is no store yet."""
    if not (folder / "store.json").is_file():
        return None
    header = StoreHeader.read(folder)
    header.check_serves(KeyIdentity.of(late.reader.name, late.heads.prompt, header.identity.head_size), (), folder)
    if tuple(late.pairs) != header.pairs:
        raise InputError(
            f"{folder}: holds {len(header.pairs)} pairs, and {len(late.pairs)} others were asked for; a store keeps "
            "those it began with"
        )
    for name in ("dtype", "pool"):
        asked, kept = getattr(settings, name), getattr(header, name)
        if asked is not None and asked != kept:
            raise InputError(f"{folder}: was made with {name} {kept}, and {asked} was asked for; a store keeps one")
    return header


def _measure(late: LateReader, sample: Sequence[Passage]) -> tuple[float, list[torch.Tensor]]:
    """Seconds per token and the keys [A, T, D] of the sample; its first batch only warms up."""
    encoded = late.encoder.encode_passages(sample)
    next(iter(late.passage_keys(encoded[:4])), None)
    started, keys, num_tokens = time.perf_counter(), [], 0
    for _, batch in late.passage_keys(encoded):
        for row, length in enumerate(batch.lengths_N.tolist()):
            keys.append(batch.keys_NATD[row, :, :length].float().cpu())
            num_tokens += length
    if not num_tokens:
        raise InputError("the corpus has no words: every passage that was looked at is empty")
    return (time.perf_counter() - started) / num_tokens, [part for part in keys if part.shape[1]]


def _new_header(
    late: LateReader, settings: IndexSettings, sample: Sequence[torch.Tensor]
) -> tuple[StoreHeader, Scales]:
    pool = settings.pool or 1
    scales = measure_scales(sample, pool)
    head_size = int(sample[0].shape[-1])
    computed_in = (
        "int8" if getattr(late.reader.model, "is_int8", False) else str(next(late.reader.model.parameters()).dtype)
    )
    header = StoreHeader(
        KeyIdentity.of(late.reader.name, late.heads.prompt, head_size),
        tuple(late.pairs),
        settings.dtype or settings.default_dtype,
        pool,
        computed_in.removeprefix("torch."),
        scales.digest,
        {"scales_measured_on": len(sample)},
    )
    return header, scales


def _say_and_check_size(
    folder: Path, header: StoreHeader, found: Survey, sample: Sequence[torch.Tensor], seconds_per_token: float
) -> None:
    """Size and time before the work starts, from the sample's tokens per character; a disk that is too small is an
    InputError.
    """
    tokens = found.missing_characters * sum(keys.shape[1] for keys in sample) / max(1, found.sample_characters)
    size = tokens * header.bytes_per_token + found.num_missing * BYTES_PER_RECORD
    what = (
        f"{header.bytes_per_token:,.0f} bytes per token ({len(header.pairs)} pairs, {header.dtype}, pool {header.pool})"
    )
    _log.info(
        f"{found.num_missing:,} passages to add ({found.num_present:,} are there), about {tokens / 1e6:.2f} million "
        "tokens: about "
        f"{size / 1e6:,.0f} MB at {what}, about {tokens * seconds_per_token / 60:,.1f} minutes"
    )
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InputError(
            f"{folder}: about {size / 1e6:,.0f} MB are needed at {what}, and {free / 1e6:,.0f} MB are free; choose "
            "another disk, fewer "
            "pairs, `dtype` int8 or `pool` 2"
        )


def _share(
    folder: Path,
    late: LateReader,
    corpus: Corpus,
    rank: int,
    world_size: int,
    progress: Callable[[Iterable[Any], int], Iterable[Any]],
    total: int,
    elsewhere: Elsewhere | None,
) -> dict[str, Any]:
    """This process's passages; all leave once every segment is sealed."""
    store = PassageStore(folder)
    form = StoredForm(store.header.dtype, store.header.pool, store.scales)
    missing = _missing_of(corpus(), store, rank, world_size)
    started, added, saturated = time.perf_counter(), 0, 0
    share = -(-total // world_size)
    if elsewhere is not None:
        found: Iterable[StoredKeys] = progress(elsewhere(missing, form), share)
    else:
        shown = iter(progress(missing, share) if rank == 0 else missing)
        found = itertools.chain.from_iterable(stored_keys(late, form, batch) for batch in _batches(shown))
    with StoreWriter(folder, store.header) as writer:
        for added, (digest, keys, num_tokens, is_shortened, cut) in enumerate(found, start=1):
            writer.add(digest, keys, num_tokens, is_shortened=is_shortened, saturated=cut)
            saturated += cut
            if added % _AT_A_TIME == 0:
                writer.commit()
    barrier(world_size, last=True)
    return {"added": added, "saturated": saturated, "seconds": time.perf_counter() - started, "processes": world_size}


def _missing_of(corpus: Iterable[Passage], store: PassageStore, rank: int, world_size: int) -> Iterator[Passage]:
    """The passages of this rank that the store lacks, each once."""
    seen: set[bytes] = set()
    documents = iter(corpus)
    while block := list(itertools.islice(documents, 4 * _AT_A_TIME)):
        digests = [passage_digest(document) for document in block]
        for document, digest, entry in zip(block, digests, store.find(digests), strict=True):
            if entry is None and digest[0] % world_size == rank and digest not in seen:
                seen.add(digest)
                yield document


def _batches(left: Iterator[Passage]) -> Iterator[list[Passage]]:
    while batch := list(itertools.islice(left, _AT_A_TIME)):
        yield batch


@torch.inference_mode()
def stored_keys(late: LateReader, form: StoredForm, batch: Sequence[Passage]) -> Iterator[StoredKeys]:
    """The keys of some passages as the store keeps them."""
    encoded = late.encoder.encode_passages(batch)
    for indices, keys in late.passage_keys(encoded):
        lengths = keys.lengths_N.tolist()
        for row, index in enumerate(indices):
            stored, cut = form.encode(keys.keys_NATD[row, :, : lengths[row]])
            yield passage_digest(batch[index]), stored, lengths[row], encoded[index].is_shortened, cut


def index_pairs(text: str, readout_pairs: Sequence[KeyPair], num_groups: int, num_layers: int) -> tuple[KeyPair, ...]:
    """What --pairs asks for: 'heads' (those of the readout), 'all' (every pair down to the readout's deepest), or
    'layer:group,...'.
    """
    if text == "heads":
        return tuple(readout_pairs)
    if text == "all":
        return tuple((layer, group) for layer in range(readout_pairs[-1][0] + 1) for group in range(num_groups))
    chosen = set()
    for part in text.split(","):
        layer, colon, group = part.partition(":")
        if not (
            colon and layer.isdecimal() and group.isdecimal() and int(layer) < num_layers and int(group) < num_groups
        ):
            raise InputError(
                f"`pairs` {part!r} is not LAYER:GROUP of a model with {num_layers} layers and {num_groups} "
                "key-value groups; "
                "give 'heads', 'all' or such as 3:0,7:2"
            )
        chosen.add((int(layer), int(group)))
    return tuple(sorted(chosen))
