"""The reference cache: the frozen model's scores of every context in every order it is trained in, computed once.

Scores depend on the context alone, not on the pair, so no second model is ever in memory. The file is JSON lines: a
header with the key (model, heads, prompt, tokenizer, chat frame, data, length, precision), then one line per context
and order. A file with another key is refused, not used. Work is split over data-parallel ranks; each appends to a part
file line by line, so a killed run continues where it stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.contexts import CONTEXTS_FILE
from data_tools.late_training_set import LateSample, LateTrainingSet
from data_tools.token_cache import tokenizer_digest
from data_tools.training_set import Sample, TrainingSet
from headrank.artifacts import content_digest, model_fingerprint
from headrank.errors import InputError
from headrank.files import quote
from headrank.formats import atomic_write
from headrank.method.heads import HeadSet
from headrank.method.late_prompt import LateEncoder

logger = logging.getLogger(__name__)

FORMAT = "headrank-reference/1"
Entry = tuple[str, int]  # context id, permutation
Gather = Callable[[dict[Entry, np.ndarray]], Iterable[dict[Entry, np.ndarray]]]  # the dictionaries of all ranks
SECONDS_BETWEEN_LINES = 30.0
_AGAIN = "delete the file and it is computed again"


def reference_key(
    model_directory: str, heads: HeadSet, training_set: TrainingSet | LateTrainingSet, precision: str
) -> dict[str, Any]:
    """Everything the reference scores depend on."""
    encoder = training_set.encoder
    readout = (
        {}
        if heads.readout is None
        else {"readout": heads.readout.identity, "head_order": [list(head) for head in heads.heads]}
    )
    return {
        "model": model_fingerprint(model_directory),
        "heads": sorted(list(head) for head in heads.heads),
        "prompt": encoder.template.hash,
        "tokenizer": tokenizer_digest(encoder)[:16],
        "chat_frame": encoder.opening_ids.tolist()
        if isinstance(encoder, LateEncoder)
        else [encoder.frame.before, encoder.frame.after],
        "data": content_digest(*(directory / CONTEXTS_FILE for directory in training_set.directories)),
        "max_length": encoder.max_length,
        "precision": precision,
        **readout,
    }


class ReferenceScores:
    """Scores by (context id, permutation), in prompt order, backed by one file. ``path`` None keeps them in memory
    only.
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: Mapping[str, Any]) -> None:
        """Read what is there; a file with another key is an InputError."""
        self.path, self.key = None if path is None else Path(path), dict(key)
        self._scores: dict[Entry, np.ndarray] = {}
        if self.path is not None:
            for file in [self.path, *self._parts()]:
                if file.exists():
                    self._read(file)

    def __len__(self) -> int:
        return len(self._scores)

    def of(self, sample: Sample) -> np.ndarray:
        """The frozen model's scores float32 [N] of this sample's documents."""
        return self.of_list(sample.context_id, len(sample.retrieval_ranks), sample.permutation)

    def of_list(self, context_id: str, num_documents: int, permutation: int = 0) -> np.ndarray:
        """The frozen model's scores float32 [N] of a whole list in one of its orders."""
        scores = self._scores[context_id, permutation]
        if len(scores) != num_documents:
            raise InputError(
                f"{self.path}: {len(scores)} scores of {context_id!r}, which has {num_documents} documents; {_AGAIN}"
            )
        return scores

    def __contains__(self, entry: Entry) -> bool:
        """Whether a context is scored in this order."""
        return entry in self._scores

    def share(self, gather: Gather) -> None:
        """Let every rank know what any rank has read: a rank that read a little later may have seen more of a part
        file.

        Called by all ranks before anything is written, so that all agree on what is missing.
        """
        for part in gather(dict(self._scores)):
            self._scores.update(part)

    def compute(
        self,
        samples: Iterable[Sample | LateSample],
        score: Callable[[Any], np.ndarray],
        *,
        total: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        is_writer: bool = True,
        barrier: Callable[[], None] = lambda: None,
        gather: Gather = lambda mine: [mine],
    ) -> None:
        """Score what is missing, this rank every ``world_size``-th, and share it: afterwards every rank has everything.

        ``is_writer`` is one rank of each tensor-parallel group; ``total`` is how many are missing, if that is known,
        for the log.
        """
        missing = (sample for sample in samples if (sample.context_id, sample.permutation) not in self)
        here = itertools.islice(missing, rank, None, world_size)
        first = next(here, None)  # rank 0 has one if any rank has
        mine: dict[Entry, np.ndarray] = {}
        with _appender(self._part(rank) if is_writer and first is not None else None, self._header()) as append:
            said = time.monotonic()
            for sample in itertools.chain([] if first is None else [first], here):
                scores = np.asarray(score(sample), np.float32)
                mine[sample.context_id, sample.permutation] = scores
                if np.isfinite(scores).all():
                    append(_line(sample.context_id, sample.permutation, scores))
                else:  # training skips it and names its query; a file that holds it would be refused
                    logger.warning("reference scores of %r are not finite", sample.context_id)
                if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                    said = time.monotonic()
                    logger.info("reference scores: %d of %s contexts", len(mine) * world_size, total or "?")
        for part in gather(mine):
            self._scores.update(part)
        if mine and rank == 0 and is_writer and self.path is not None:
            self._merge()
        barrier()

    def _read(self, file: Path) -> None:
        if file.is_dir():
            raise InputError(
                f"{file}: a folder where the reference scores belong; move it or give another `reference_cache`"
            )
        try:
            with open(file, "rb") as stream:
                self._read_lines(file, stream)
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror}); check its permissions") from error

    def _read_lines(self, file: Path, lines: Iterator[bytes]) -> None:
        first = next(lines, None)
        header = None if first is None else _parsed(first)
        if first is None or (header is None and file != self.path):
            return  # a part file killed before its first line
        if header is None or header.get("format") != FORMAT or not isinstance(header.get("key"), dict):
            raise InputError(f"{file}:1: not the header of a {FORMAT} file; delete it and it is computed again")
        # also what an older version had: it stands for other scores unless null
        names = dict.fromkeys([*self.key, *header["key"]])
        differing = [name for name in names if header["key"].get(name) != self.key.get(name)]
        if differing:
            raise InputError(
                f"{file}: reference scores of another {' and '.join(differing)}; delete the file or give another "
                "`reference_cache`"
            )
        for number, line in enumerate(lines, start=2):
            row = _parsed(line)
            if row is None and not line.endswith(b"\n") and file != self.path:
                break  # the last line of a killed run
            if row is None:
                raise InputError(f"{file}:{number}: not a JSON object in UTF-8; {_AGAIN}")
            context_id, permutation = row.get("context_id"), row.get("permutation")
            if not isinstance(context_id, str) or type(permutation) is not int:
                raise InputError(f"{file}:{number}: needs a text 'context_id' and a whole 'permutation'; {_AGAIN}")
            scores = _finite_scores(row.get("scores"))
            if scores is None:
                found = quote(json.dumps(row.get("scores")))
                raise InputError(
                    f"{file}:{number}: 'scores' of {context_id!r} must be finite numbers, found {found}; {_AGAIN}"
                )
            self._scores[context_id, permutation] = scores

    def _merge(self) -> None:
        """Write everything into one file, then drop the parts."""
        assert self.path is not None
        with atomic_write(self.path) as stream:
            stream.write(self._header())
            for (context_id, permutation), scores in sorted(self._scores.items()):
                if np.isfinite(scores).all():
                    stream.write(_line(context_id, permutation, scores))
        for part in self._parts():
            part.unlink(missing_ok=True)

    def _header(self) -> str:
        return json.dumps({"format": FORMAT, "key": self.key}, sort_keys=True) + "\n"

    def _parts(self) -> list[Path]:
        return [] if self.path is None else sorted(self.path.parent.glob(f"{self.path.name}.part-*"))

    def _part(self, rank: int) -> Path | None:
        return None if self.path is None else self.path.with_name(f"{self.path.name}.part-{rank}")


@contextlib.contextmanager
def _appender(path: Path | None, header: str) -> Iterator[Callable[[str], object]]:
    """A function that appends a whole line to a file and flushes it; a torn last line of an earlier run is cut off
    first.
    """
    if path is None:
        yield lambda line: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.read_bytes() if path.exists() else b""
    path.write_bytes(kept[: kept.rfind(b"\n") + 1] or header.encode())
    with open(path, "a", encoding="utf-8", buffering=1) as stream:
        yield stream.write


def needed_contexts(training_set: TrainingSet | LateTrainingSet, num_samples: int) -> Iterator[tuple[int, int]]:
    """Every (context, permutation) that the first ``num_samples`` samples of training visit, each once."""
    everything = training_set.num_contexts * len(training_set.permutation_ids)
    if num_samples >= 2 * everything:
        yield from itertools.product(range(training_set.num_contexts), training_set.permutation_ids)
        return
    yield from dict.fromkeys(map(training_set.context_at, range(num_samples)))


def _line(context_id: str, permutation: int, scores: np.ndarray) -> str:
    """float32 survives the way through a JSON number unchanged."""
    return json.dumps({"context_id": context_id, "permutation": permutation, "scores": scores.tolist()}) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also bytes that are not UTF-8
        return None
    return row if isinstance(row, dict) else None


def _finite_scores(value: Any) -> np.ndarray | None:
    """A JSON list of numbers as float32 [N]; None for anything else and for what float32 cannot hold."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if numbers.ndim != 1 or numbers.dtype.kind not in "if":
        return None
    with np.errstate(over="ignore"):
        scores = numbers.astype(np.float32)
    return scores if np.isfinite(scores).all() else None
