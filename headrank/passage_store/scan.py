"""The scan: scores of one query against stored keys, read in place, tile by tile.

Per key pair one product of a tile's keys with all query vectors that read the pair, powers of two of the result, and a
sum per passage. int8 keys are multiplied as integers with query vectors of 15 bits (two integers of 8: the second holds
what the first rounds off); sums of integers are exact, so that a score does not depend on what else is scanned. bf16
and fp32 keys are multiplied in float32, where another number of keys may round the last bits differently.

There is no maximum to subtract: powers of two of float32 hold exponents of 126 either way, and logits are measured from
the centre of the pair's keys. A passage that leaves this range (its sum is 0 or not finite) is summed again with its
maximum.

Shapes: K heads, A key pairs, R query rows, X query vectors of a pair (its heads x R), T stored tokens of a tile, N
passages, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headrank.method.late_layout import QueryVectors, head_slots
from headrank.method.readout import mean_over_rows, row_values, weighted_sum
from headrank.passage_store.keys import StoredForm
from headrank.passage_store.segment import NUMPY_TYPE
from headrank.passage_store.store import Entry

TILE_TOKENS = 8192  # 8 MB of int8 keys at 16 pairs of 64: within the cache of a server's core group
_LOG2_E = math.log2(math.e)
_FINE = 254  # the second integer's step is the first's divided by this


@dataclass(frozen=True)
class _QueryMatrices:
    """All queries' vectors, pair by pair, ready for products with stored numbers.

    Columns are by the pair's head, then query, then row. ``constant_AX`` is q . centre, in natural units.
    """

    matrices: list[torch.Tensor]  # of each pair: int8 [D, 2X] (coarse, then fine) or float32 [D, X], times log2(e)
    steps: list[torch.Tensor]  # [X] of int8
    constant_AX: torch.Tensor


class Scanner:
    """Scores entries of one store for one readout; keeps its buffers from call to call (not for several threads at
    once).
    """

    def __init__(self, form: StoredForm, places: Sequence[int], pair_of_head: Sequence[int], head_size: int) -> None:
        """``places`` are the readout's pairs among the stored ones, ``pair_of_head`` the pair (of the readout's) of
        each head.
        """
        self.form, self.places, self.head_size = form, list(places), head_size
        self.slots_K, self.most = head_slots(pair_of_head, len(self.places))
        self.heads_of_pair = [
            [head for head, pair in enumerate(pair_of_head) if pair == number] for number in range(len(self.places))
        ]
        self._is_all = self.places == list(range(len(form.scales.scale_AD)))
        self._is_in_order = self.slots_K.tolist() == list(range(len(self.places) * self.most))
        self._buffers: dict[str, torch.Tensor] = {}
        self._scale_AD, self._centre_AD = (
            torch.from_numpy(values[self.places]) for values in (form.scales.scale_AD, form.scales.centre_AD)
        )

    @torch.inference_mode()
    def scores(
        self,
        queries: Sequence[QueryVectors],
        entries: Sequence[Entry],
        weights_K: torch.Tensor,
        offsets_K: torch.Tensor | None = None,
        floor: float = 0.0,
    ) -> torch.Tensor:
        """Scores [U, N] of queries (each with U = 1 of its own), float32 on the CPU; an empty passage gets 0, as
        from ``late_scores``.
        """
        weights_K = weights_K.cpu()
        offsets_K = None if offsets_K is None else offsets_K.cpu()
        vectors = [query.vectors_UKRD[0].float().cpu() for query in queries]
        prepared = self._prepare(torch.cat(vectors, dim=1))
        parts = []
        for tile in _tiles(entries):
            is_empty_N1 = torch.tensor([entry.num_tokens == 0 for entry in tile])[:, None]
            of_tile = []
            for query, sums_NKR in zip(queries, self._log_sums(prepared, tile, vectors), strict=True):
                sums_NKR.masked_fill_(is_empty_N1[..., None], 0.0)
                values_NKR = row_values(sums_NKR, query.opening_UKR[0].cpu(), offsets_K, floor)
                values_NK = mean_over_rows(values_NKR, query.weights_UR[0].cpu())
                of_tile.append(weighted_sum(values_NK.masked_fill(is_empty_N1, 0.0), weights_K))
            parts.append(torch.stack(of_tile))
        return torch.cat(parts, dim=1) if parts else torch.zeros(len(queries), 0)

    def _prepare(self, vectors_KRD: torch.Tensor) -> _QueryMatrices:
        """Rows are those of all queries, one after another."""
        slots = vectors_KRD.new_zeros(len(self.places) * self.most, *vectors_KRD.shape[1:]).index_copy_(
            0, self.slots_K, vectors_KRD
        )
        vectors_AXD = slots.view(len(self.places), -1, self.head_size)
        # not a matrix product: its rounding would depend on X
        constant_AX = (vectors_AXD * self._centre_AD[:, None]).sum(-1)
        widths = [len(heads) * vectors_KRD.shape[1] for heads in self.heads_of_pair]
        if self.form.dtype != "int8":
            columns_ADX = (vectors_AXD * _LOG2_E).transpose(1, 2)
            return _QueryMatrices(
                [columns[:, :width].contiguous() for columns, width in zip(columns_ADX, widths, strict=True)],
                [],
                constant_AX,
            )
        scaled_AXD = vectors_AXD * self._scale_AD[:, None] * _LOG2_E
        step_AX1 = scaled_AXD.abs().amax(-1, keepdim=True).div_(127).clamp_min_(1e-30)
        scaled_AXD = scaled_AXD.div_(step_AX1)
        coarse_AXD = scaled_AXD.round()
        fine_AXD = scaled_AXD.sub_(coarse_AXD).mul_(_FINE).round_()
        both = zip(
            coarse_AXD.to(torch.int8).transpose(1, 2), fine_AXD.to(torch.int8).transpose(1, 2), widths, strict=True
        )
        matrices = [torch.cat((coarse_DX[:, :width], fine_DX[:, :width]), dim=1) for coarse_DX, fine_DX, width in both]
        steps = [step_X[:width] for step_X, width in zip(step_AX1[..., 0].div(_FINE), widths, strict=True)]
        return _QueryMatrices(matrices, steps, constant_AX)

    def _log_sums(
        self, prepared: _QueryMatrices, tile: Sequence[Entry], vectors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per query the log-sum-exp [N, K, R] in natural units of each passage's keys."""
        lengths = [entry.num_keys for entry in tile]
        keys_ATD = self._gather(tile, lengths)
        starts_N = torch.tensor([0, *np.cumsum(lengths)[:-1]])
        numbers_T = torch.arange(keys_ATD.shape[1])
        counts_T = self._counts(tile, lengths)
        # 1 where a pair has fewer heads than others
        sums_ANX = torch.ones(len(self.places), len(tile), prepared.constant_AX.shape[1])
        for pair in range(len(self.places)):
            # no maximum is subtracted: centred keys keep most exponents small, and the rare overflow is done again in
            # _mend
            powers_TX = self._logits(keys_ATD[pair], prepared, pair).exp2_()
            # embedding_bag sums each passage on its own: no other passage changes how its sum is rounded
            sums_NX = F.embedding_bag(numbers_T, powers_TX, starts_N, mode="sum", per_sample_weights=counts_T)
            sums_ANX[pair, :, : sums_NX.shape[1]] = sums_NX
        sums_ANX.log_().add_(prepared.constant_AX[:, None])
        sums_NKX = sums_ANX.unflatten(2, (self.most, -1)).transpose(0, 1).flatten(1, 2)
        sums_NKX = sums_NKX if self._is_in_order else sums_NKX[:, self.slots_K]
        # contiguous: sums over rows must not be rounded by what else is scanned
        sums = [part.contiguous() for part in sums_NKX.split([vectors_KRD.shape[1] for vectors_KRD in vectors], dim=2)]
        for sums_NKR, vectors_KRD in zip(sums, vectors, strict=True):
            self._mend(sums_NKR, tile, vectors_KRD)
        return sums

    def _gather(self, tile: Sequence[Entry], lengths: Sequence[int]) -> torch.Tensor:
        """The tile's keys side by side, [A, T, D] in the stored format: the only copy, into a buffer that stays."""
        dtype = {"int8": torch.int8, "bf16": torch.int16, "fp32": torch.float32}[self.form.dtype]
        keys_ATD = self._buffer("keys", (len(self.places), sum(lengths), self.head_size), dtype)
        into = keys_ATD.numpy().view(NUMPY_TYPE[self.form.dtype])
        start = 0
        for entry, length in zip(tile, lengths, strict=True):
            stored = entry.keys_ATD
            if self._is_all:
                into[:, start : start + length] = stored
            else:
                for row, place in enumerate(self.places):
                    into[row, start : start + length] = stored[place]
            start += length
        return keys_ATD

    def _counts(self, tile: Sequence[Entry], lengths: Sequence[int]) -> torch.Tensor | None:
        """With pooling, how many tokens each stored key stands for: the last one of a passage may stand for fewer."""
        if self.form.pool == 1:
            return None
        counts_T = torch.full((sum(lengths),), float(self.form.pool))
        ends = np.cumsum(lengths)
        for entry, length, end in zip(tile, lengths, ends, strict=True):
            if length:
                counts_T[end - 1] = entry.num_tokens - self.form.pool * (length - 1)
        return counts_T

    def _logits(self, keys_TD: torch.Tensor, prepared: _QueryMatrices, pair: int) -> torch.Tensor:
        """(q . k - q . centre) in units of log 2, float32 [T, X]."""
        matrix = prepared.matrices[pair]
        if self.form.dtype != "int8":
            logits_TX = self._buffer("logits", (len(keys_TD), matrix.shape[1]), torch.float32)
            wide_TD = keys_TD
            if self.form.dtype == "bf16":
                wide_TD = self._buffer("wide", tuple(keys_TD.shape), torch.float32)
                wide_TD.copy_(keys_TD.view(torch.bfloat16))
            return torch.addmm(prepared.constant_AX[pair, : matrix.shape[1]] * -_LOG2_E, wide_TD, matrix, out=logits_TX)
        width = matrix.shape[1] // 2
        both_TX2 = self._buffer("both", (len(keys_TD), 2 * width), torch.int32)
        torch._int_mm(keys_TD, matrix, out=both_TX2)
        # coarse * 254 + fine fits 32 bits up to a head size of 512: 512 x 127 x 127 x 255 is below 2^31
        whole_TX = self._buffer("whole", (len(keys_TD), width), torch.int32)
        torch.add(both_TX2[:, width:], both_TX2[:, :width], alpha=_FINE, out=whole_TX)
        return torch.mul(
            whole_TX, prepared.steps[pair], out=self._buffer("logits", (len(keys_TD), width), torch.float32)
        )

    def _mend(self, sums_NKR: torch.Tensor, tile: Sequence[Entry], vectors_KRD: torch.Tensor) -> None:
        """Sum passages again, with their maximum, whose powers of two left the range of float32."""
        # one sum instead of a look at every number: not finite is rare
        if sums_NKR.sum().isfinite():
            return
        is_wrong_N = ~sums_NKR.isfinite().flatten(1).all(1)
        for row in is_wrong_N.nonzero()[:, 0].tolist():
            stored = tile[row].keys_ATD
            if stored.shape[1]:
                keys_ATD = self.form.decode(stored)[self.places]
                counts = self._counts([tile[row]], [stored.shape[1]])
                for pair, heads in enumerate(self.heads_of_pair):
                    logits = vectors_KRD[heads] @ keys_ATD[pair].T
                    sums_NKR[row, heads] = (logits if counts is None else logits + counts.log()).logsumexp(-1)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that is reused: fresh pages for megabytes of logits would cost more than the product that fills
        them.
        """
        size = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = self._buffers[name] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)


def _tiles(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries in order, as many at a time as fit a tile; a longer passage is a tile of its own."""
    tile: list[Entry] = []
    size = 0
    for entry in entries:
        length = entry.num_keys
        if tile and size + length > TILE_TOKENS:
            yield tile
            tile, size = [], 0
        tile.append(entry)
        size += length
    if tile:
        yield tile
