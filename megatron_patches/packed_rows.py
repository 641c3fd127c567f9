"""Rows of different lengths behind one shared opening as one sequence without padding, and their attention.

The sequence is [opening, row 0, row 1, ...]: norms, projections and MLPs, nearly all of the work, see real tokens only
and the opening once. Attention alone needs rows side by side: it unfolds them into a few padded batches of similar
lengths, the opening in front of each row, runs plain causal attention (no mask: padding stands behind what is real) and
folds the result back.

Shapes: S tokens of the sequence, O of the opening, B rows of one batch, T its longest row with the opening, F = sum of
B T over the batches, P query heads, G key-value groups, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrank.method.attention import causal_context
from megatron_patches import device

# rows whose lengths differ by less share a batch: attention is a small part of the work, few kernels are worth more
_BUCKET = 32
# tokens: plain products keep the logits of every layer, 50 MB a layer for 32 such passages
_SHORT = 128


@dataclass(frozen=True)
class PackedRows:
    """Where each row lies. Trailing tokens of the sequence that belong to no row (padding for sequence parallelism)
    are ignored.
    """

    num_opening: int
    starts: tuple[int, ...]  # first token of each row
    lengths: tuple[int, ...]
    position_ids_1S: torch.Tensor
    shapes: tuple[tuple[int, int], ...]  # (B, T) of each batch
    token_of_slot_F: torch.Tensor  # the token in each slot of the batches
    slot_of_token_S: torch.Tensor  # a token's own slot; the opening's are those in front of the first row
    is_own_slot_F: torch.Tensor  # neither padding nor a repetition of the opening
    is_token_S: torch.Tensor  # whether the token belongs to the opening or a row
    opening_slots_OB: torch.Tensor  # the slots of each opening token, one per row

    @classmethod
    def of(
        cls,
        num_opening: int,
        lengths: Sequence[int],
        first_positions: Sequence[int],
        num_tokens: int | None = None,
        device: Any = None,
    ) -> PackedRows:
        """Lay out rows of these lengths whose positions count up from ``first_positions``; ``num_tokens`` pads the
        sequence.
        """
        assert num_opening > 0 and len(lengths) and min(lengths) > 0, "rows and the opening have tokens"
        starts = num_opening + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(starts[-1]) if num_tokens is None else num_tokens
        positions = np.zeros(total, np.int64)
        positions[:num_opening] = np.arange(num_opening)
        slots_of_token = np.zeros(total, np.int64)
        tokens, owned, opening, shapes, offset = [], [], [], [], 0
        for batch in _batches(lengths):
            longest = num_opening + max(lengths[row] for row in batch)
            table = np.zeros((len(batch), longest), np.int64)
            is_own = np.zeros((len(batch), longest), bool)
            # padding stays 0, the opening's first token: finite values that no real row sees, for padding stands at the
            # end
            table[:, :num_opening] = np.arange(num_opening)
            for line, row in enumerate(batch):
                own = np.arange(lengths[row])
                table[line, num_opening : num_opening + lengths[row]] = starts[row] + own
                is_own[line, num_opening : num_opening + lengths[row]] = True
                slots_of_token[starts[row] + own] = offset + line * longest + num_opening + own
                positions[starts[row] + own] = first_positions[row] + own
            opening.append(offset + np.arange(len(batch)) * longest + np.arange(num_opening)[:, None])
            tokens.append(table.ravel())
            owned.append(is_own.ravel())
            shapes.append(table.shape)
            offset += table.size
        opening_slots = np.concatenate(opening, axis=1)
        owned_slots = np.concatenate(owned)
        slots_of_token[:num_opening] = opening_slots[:, 0]
        # the opening is repeated in front of every row of a batch; one copy owns its result, the others take no
        # gradient twice
        owned_slots[opening_slots[:, 0]] = True
        return cls(
            num_opening=num_opening,
            starts=tuple(int(start) for start in starts[:-1]),
            lengths=tuple(int(length) for length in lengths),
            position_ids_1S=torch.from_numpy(positions)[None].to(device),
            shapes=tuple(shapes),
            token_of_slot_F=torch.from_numpy(np.concatenate(tokens)).to(device),
            slot_of_token_S=torch.from_numpy(slots_of_token).to(device),
            is_own_slot_F=torch.from_numpy(owned_slots).to(device),
            is_token_S=(torch.arange(total) < int(starts[-1])).to(device),
            opening_slots_OB=torch.from_numpy(opening_slots).to(device),
        )

    def context(
        self, query_S1PD: torch.Tensor, key_S1GD: torch.Tensor, value_S1GD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of every token to the opening and its own row up to itself: [S, 1, P * D]."""
        unfolded = [_Unfold.apply(tensor[:, 0].flatten(1), self) for tensor in (query_S1PD, key_S1GD, value_S1GD)]
        heads = [tensor.shape[2] for tensor in (query_S1PD, key_S1GD, value_S1GD)]
        batches, offset = [], 0
        for rows, length in self.shapes:
            query, key, value = (
                flat_FX[offset : offset + rows * length].view(rows, length, count, -1).transpose(1, 2)
                for flat_FX, count in zip(unfolded, heads, strict=True)
            )
            attend = _short_context if _is_short_on_cpu(query) else causal_context
            batches.append(attend(query, key, value, scale).transpose(1, 2).reshape(rows * length, -1))
            offset += rows * length
        return _Fold.apply(batches[0] if len(batches) == 1 else torch.cat(batches), self)[:, None]


def _is_short_on_cpu(query_BPTD: torch.Tensor) -> bool:
    # the planner rehearses a GPU's kernels on tensors that say they are on a CPU
    is_cpu = query_BPTD.device.type == "cpu" and not device.has_compiled_fusions()
    return is_cpu and query_BPTD.dtype == torch.bfloat16 and query_BPTD.shape[2] <= _SHORT


def _short_context(
    query_BPTD: torch.Tensor, key_BGTD: torch.Tensor, value_BGTD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention [B, P, T, D] by two plain products and a float32 softmax.

    For training short rows in bfloat16 on a CPU, where torch's fused kernel took 26% of a step in its backward pass:
    forward and backward of 16 rows of 96 tokens cost 9 instead of 33 ms. Logits are rounded to bfloat16, as Megatron's
    unfused attention does.
    """
    group_size = query_BPTD.shape[1] // key_BGTD.shape[1]
    key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key_BGTD, value_BGTD))
    logits = torch.matmul(query_BPTD * scale, key.transpose(-1, -2)).float()
    # -inf would do as well, but a sum costs no mask in backward
    future = torch.full(logits.shape[-2:], -1e30, device=logits.device).triu(1)
    return torch.matmul((logits + future).softmax(dim=-1).to(value.dtype), value)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Rows by length, in batches of rows that need the same number of whole buckets."""
    found: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        found.setdefault(-(-lengths[row] // _BUCKET), []).append(row)
    return list(found.values())


class _Unfold(torch.autograd.Function):
    """[S, X] -> [F, X]. Backward is a gather, where autograd's own would add row by row; repeated openings are
    summed.
    """

    @staticmethod
    def forward(ctx: Any, values_SX: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows = rows
        return values_SX.index_select(0, rows.token_of_slot_F)

    @staticmethod
    def backward(ctx: Any, gradient_FX: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        rows: PackedRows = ctx.rows
        result = gradient_FX.index_select(0, rows.slot_of_token_S)
        slots_OB = rows.opening_slots_OB
        of_opening = gradient_FX.index_select(0, slots_OB.flatten()).view(*slots_OB.shape, -1)
        # summed in float32: a bfloat16 sum over hundreds of rows would lose the small ones
        result[: rows.num_opening] = of_opening.sum(1, dtype=torch.float32).to(result.dtype)
        return result.masked_fill_(~rows.is_token_S[:, None], 0), None


class _Fold(torch.autograd.Function):
    """[F, X] -> [S, X], the opening from in front of the first row; padding and its gradient are zero."""

    @staticmethod
    def forward(ctx: Any, values_FX: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows = rows
        return values_FX.index_select(0, rows.slot_of_token_S).masked_fill_(~rows.is_token_S[:, None], 0)

    @staticmethod
    def backward(ctx: Any, gradient_SX: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        rows: PackedRows = ctx.rows
        return gradient_SX.index_select(0, rows.token_of_slot_F).masked_fill_(~rows.is_own_slot_F[:, None], 0), None
