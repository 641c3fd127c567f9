"""What a readout is fitted from: the log ratio of every head and query row to every passage of a list, and the
passages' lengths.

A log ratio is the log sum over a passage minus that over the opening, in the same row. Rows are kept apart, so that
another floor or another offset costs no forward. Kept as float16: its rounding (below 0.01) is far under the spread of
a list.

Shapes: N passages, K heads (layer by layer), R query rows.
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

from headrank.files import atomic_write
from headrank.method.heads import HeadSet
from headrank.method.late_layout import passage_log_sums
from headrank.method.ordering import reranking_order
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.method.spans import PromptEncoder
from headrank.reranking.late_reader import LateReader
from headrank.reranking.reader import AttentionReader

STATISTICS_TOKENS = 768  # of one batch: statistics need no bit-identity with a reranker's, only its numbers


@dataclass(frozen=True)
class ReadoutStatistics:
    """All heads' log ratios of one list, in the order its passages were given."""

    ratios_NKR: np.ndarray  # float16
    lengths_N: np.ndarray  # int32, tokens of each passage; 0 for an empty one, whose ratios are 0


class LateStatistics:
    """Computes ReadoutStatistics in the late layout for all heads of the first layers of a model."""

    def __init__(self, reader: AttentionReader, prompt: PromptTemplate, num_layers: int | None = None) -> None:
        """``num_layers`` is how many layers are read; all by default."""
        layers = num_layers or reader.num_layers
        heads = tuple((layer, head) for layer in range(layers) for head in range(reader.num_heads))
        readout = Readout(weights=(1.0,) * len(heads))
        every = HeadSet(
            heads, "readout", reader.name, reader.num_layers, reader.num_heads, prompt=prompt, readout=readout
        )
        self.late = LateReader(reader, every, tokens_per_batch=STATISTICS_TOKENS)

    @torch.inference_mode()
    def of(self, query: str, documents: Sequence[tuple[str, str]]) -> ReadoutStatistics:
        """The statistics of one list."""
        late = self.late
        vectors = late.query_vectors(late.encoder.encode_query(query))
        passages = late.encoder.encode_passages(documents)
        shape = (len(passages), *vectors.opening_UKR.shape[1:])
        ratios_NKR, lengths_N = np.zeros(shape, np.float16), np.zeros(len(passages), np.int32)
        for indices, keys in late.passage_keys(passages):
            sums_NKR = passage_log_sums(vectors, keys, late.pair_of_head)[0] - vectors.opening_UKR[0]
            ratios_NKR[indices] = sums_NKR.masked_fill((keys.lengths_N == 0)[:, None, None], 0.0).cpu().numpy()
            lengths_N[indices] = keys.lengths_N.cpu().numpy()
        return ReadoutStatistics(ratios_NKR, lengths_N)


class PromptStatistics:
    """Computes ReadoutStatistics of lists that stand in one prompt, in the sequential or the parallel layout."""

    def __init__(self, reader: AttentionReader, prompt: PromptTemplate, num_layers: int | None = None) -> None:
        """``num_layers`` is how many layers are read; all by default."""
        self.reader = reader
        self.heads = {layer: list(range(reader.num_heads)) for layer in range(num_layers or reader.num_layers)}
        self.encoder = PromptEncoder(reader.tokenizer, prompt, reader.encoder.max_length, calibrate=False)

    @torch.inference_mode()
    def of(self, query: str, documents: Sequence[tuple[str, str]]) -> ReadoutStatistics:
        """The statistics of one list."""
        order = reranking_order(self.encoder.template, documents)
        context = self.encoder.encode(query, [documents[rank] for rank in order])
        ratios = self.reader.read([context], self.heads, reads=("log-mass",)).log_ratios
        lengths = np.array([last - first for first, last in context.document_spans], np.int32)
        found_NKR = np.concatenate([ratios[layer][0].cpu().numpy() for layer in self.heads], axis=1)
        found_NKR[lengths == 0] = 0.0
        back = np.argsort(order)
        return ReadoutStatistics(found_NKR[back].astype(np.float16), lengths[back])


class ReadoutStatisticsCache:
    """Readout statistics on disk, one .npz a list, named by everything they depend on; an interrupted run resumes
    from it.
    """

    def __init__(self, directory: str | os.PathLike[str], model_key: str, prompt: PromptTemplate) -> None:
        """``model_key`` names the weights and how they are read (see ``statistics.reader_key``)."""
        self.directory, self.key = (
            Path(directory),
            f"log-ratios/1|{model_key}|{json.dumps(prompt.identity, sort_keys=True)}",
        )

    def path(self, query: str, documents: Sequence[tuple[str, str]]) -> Path:
        """Where the statistics of this list lie."""
        name = hashlib.sha256(json.dumps([self.key, query, [list(document) for document in documents]]).encode())
        return self.directory / f"{name.hexdigest()[:32]}.npz"

    def load(self, query: str, documents: Sequence[tuple[str, str]], num_heads: int) -> ReadoutStatistics | None:
        """The first ``num_heads`` heads (layer by layer) of an earlier run, or None; a file cut short counts as
        absent.
        """
        try:
            with np.load(self.path(query, documents)) as values:
                ratios_NKR = values["ratios_NKR"]
                if ratios_NKR.shape[1] < num_heads:
                    return None
                return ReadoutStatistics(ratios_NKR[:, :num_heads], values["lengths_N"])
        except (FileNotFoundError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def save(self, query: str, documents: Sequence[tuple[str, str]], statistics: ReadoutStatistics) -> None:
        """Write atomically; deeper statistics replace shallower ones."""
        with atomic_write(self.path(query, documents), "wb") as stream:
            np.savez(stream, **vars(statistics))
