"""What every attention policy needs to know of one context: masses, calibrated masses and entropies of all heads.

Shapes: L layers read, H heads, N documents (prompt order), S sequence. One forward gives them all; Eq. 2-4, CoRe and QR
are small functions of these arrays, so that they can be kept on disk and another temperature costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrank.artifacts import fingerprint, model_fingerprint
from headrank.formats import atomic_write
from headrank.method.scores import calibrated_scores, entropy, sum_over_documents
from headrank.method.spans import EncodedContext
from headrank.reranking.reader import AttentionReader

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


def head_statistics(
    reader: AttentionReader, contexts: Sequence[EncodedContext], num_layers: int | None = None
) -> list[HeadStatistics]:
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
    """Head statistics on disk, one .npz a context, named by everything they depend on; an interrupted run resumes
    from it.
    """

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
        """The first ``num_layers`` layers of what an earlier run read, or None; a file cut short by a crash counts
        as absent.
        """
        try:
            with np.load(self.path(context)) as values:
                if len(values["raw_LHN"]) < num_layers:
                    return None
                raw, calibrated, entropies = (
                    values[name][:num_layers] for name in ("raw_LHN", "calibrated_LHN", "entropy_LH")
                )
                return HeadStatistics(raw, calibrated, entropies, sequence_length=int(values["sequence_length"]))
        except (FileNotFoundError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def save(self, context: EncodedContext, statistics: HeadStatistics) -> None:
        """Write atomically; deeper statistics replace shallower ones."""
        with atomic_write(self.path(context), "wb") as stream:
            np.savez(stream, **vars(statistics))


def reader_key(reader: AttentionReader) -> str:
    """A name for the weights behind a reader and how they are read: the model's fingerprint, its configuration,
    dtype and device.
    """
    config = {key: value for key, value in reader.config.to_dict().items() if key not in _DEPTH_AND_NAME}
    return fingerprint(
        {
            "model": model_fingerprint(reader.name),
            # of a name on the hub, which may come to mean other weights
            "revision": getattr(reader.config, "_commit_hash", None),
            "config": config | {"layers": reader.num_layers},
            "dtype": str(reader.model.dtype),
            "device": reader.device.type,
        }
    )
