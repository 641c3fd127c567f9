"""What every attention policy needs to know of one context: masses, calibrated masses and entropies of all heads.

Shapes: L layers read, H heads, N documents (prompt order), S sequence. One forward gives them all; Eq. 2-4, CoRe and QR
are small functions of these arrays, so that they can be kept on disk and another temperature costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrank.formats import atomic_write
from headrank.method.scores import calibrated_scores, entropy, sum_over_documents
from headrank.method.spans import EncodedContext
from headrank.reranking.reader import AttentionReader

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # of each weight file, for the fingerprint of a model
# how deep a model was loaded, and from where, is no part of its weights
_DEPTH_AND_NAME = ("_name_or_path", "num_hidden_layers", "layer_types", "max_window_layers")


@dataclass(frozen=True)
class HeadStatistics:
    """All heads of one context. The calibration of ``calibrated_LHN`` drops outlier tokens head by head."""

    raw_LHN: np.ndarray  # float32, alpha_d of Eq. 1
    calibrated_LHN: np.ndarray  # float32
    entropy_LH: np.ndarray  # float32, H of the averaged row over the whole sequence, in nats
    sequence_length: int  # L_seq: prefix and query branch

    def masses(self, is_calibrated: bool) -> torch.Tensor:
        """The calibrated or the uncalibrated masses [L, H, N]."""
        return torch.from_numpy(self.calibrated_LHN if is_calibrated else self.raw_LHN)


def head_statistics(reader: AttentionReader, contexts: Sequence[EncodedContext], num_layers: int | None = None) -> list[HeadStatistics]:
    """One forward of a batch, read for every head of the first ``num_layers`` layers (default: of all).

    Where nothing is calibrated (an encoder without the calibration branch) the calibrated masses are the raw ones.
    """
    layers = range(num_layers or reader.num_layers)
    capture = reader.read(contexts, {layer: range(reader.num_heads) for layer in layers})
    layout = capture.layout
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    shape = (len(contexts), len(layers), reader.num_heads)
    raw, calibrated, entropies = [], [], []
    for layer in layers:  # one layer at a time: the sums are small, the rows of a long context are not
        rows_BHS = capture.query_rows.pop(layer)
        raw.append(sum_over_documents(rows_BHS, owner_BS, num_documents))
        entropies.append(entropy(rows_BHS))
        if layout.has_calibration:
            calibrated.append(calibrated_scores(rows_BHS, capture.calibration_rows.pop(layer), owner_BS, num_documents))
    raw_BLHN = torch.stack(raw, dim=1).cpu().numpy()
    calibrated_BLHN = torch.stack(calibrated, dim=1).cpu().numpy() if calibrated else raw_BLHN
    entropy_BLH = torch.stack(entropies, dim=1).reshape(shape).cpu().numpy()
    return [
        HeadStatistics(
            raw_LHN=raw_BLHN[index, ..., :count].copy(),
            calibrated_LHN=calibrated_BLHN[index, ..., :count].copy(),
            entropy_LH=entropy_BLH[index].copy(),
            sequence_length=context.prefix_length + context.query_length,
        )
        for index, (context, count) in enumerate(zip(contexts, layout.num_documents_B, strict=True))
    ]


class StatisticsCache:
    """Head statistics on disk, one .npz a context, named by everything they depend on; an interrupted run resumes from it."""

    def __init__(self, directory: str | os.PathLike[str], model_key: str) -> None:
        """``model_key`` names the weights and how they are read (see ``reader_key``)."""
        self.directory, self.model_key = Path(directory), model_key

    def path(self, context: EncodedContext) -> Path:
        """Where the statistics of this context lie: its tokens and spans are part of the name."""
        digest = hashlib.sha256(f"{self.model_key}|{context.query_rows}|{context.calibration_rows}|".encode())
        digest.update(np.ascontiguousarray(context.input_ids, dtype=np.int32).tobytes())
        digest.update(repr((context.prefix_length, context.document_spans)).encode())
        return self.directory / f"{digest.hexdigest()[:32]}.npz"

    def load(self, context: EncodedContext, num_layers: int) -> HeadStatistics | None:
        """The first ``num_layers`` layers of what an earlier run read, or None; a file cut short by a crash counts as absent."""
        try:
            with np.load(self.path(context)) as values:
                if len(values["raw_LHN"]) < num_layers:
                    return None
                raw, calibrated, entropies = (values[name][:num_layers] for name in ("raw_LHN", "calibrated_LHN", "entropy_LH"))
                return HeadStatistics(raw, calibrated, entropies, sequence_length=int(values["sequence_length"]))
        except (FileNotFoundError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def save(self, context: EncodedContext, statistics: HeadStatistics) -> None:
        """Write atomically; deeper statistics replace shallower ones."""
        with atomic_write(self.path(context), "wb") as stream:
            np.savez(stream, **vars(statistics))


def reader_key(reader: AttentionReader) -> str:
    """A name for the weights behind a reader: configuration, dtype and samples across every weight file of a directory.

    Sampling 4 MiB per file finds any retrained model without reading gigabytes; a hub name stands for itself.
    """
    config = {key: value for key, value in reader.config.to_dict().items() if key not in _DEPTH_AND_NAME} | {"layers": reader.num_layers}
    digest = hashlib.sha256(f"{reader.model.dtype}|{reader.device.type}|{json.dumps(config, sort_keys=True, default=str)}".encode())
    folder = Path(reader.name)
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder.is_dir() else []
    if not files:
        digest.update(f"{reader.name}|{getattr(reader.config, '_commit_hash', None)}".encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"|{path.name}|{size}|".encode())
        with open(path, "rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:24]
