"""Log sums of the query rows in the sequential and the parallel layout, from the same Q and K as the masses.

Shapes: B batch, H query heads, G key-value groups, S sequence, D head size, K heads asked for, R query rows, N
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrank.method.attention import visible_keys
from headrank.method.readout import mean_over_rows, row_values, segment_log_sums

if TYPE_CHECKING:
    from headrank.method.attention import BranchLayout


def row_log_ratios(
    query: torch.Tensor,
    key: torch.Tensor,
    layout: BranchLayout,
    heads: torch.Tensor | Sequence[int],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Log sum over each document minus that over the opening, in each row of I_q: float32 [B, N, K, R], for the heads
    asked for.

    The opening is everything before the first document. Where a window hides it from a row, its log sum is not defined:
    such a model is refused by the caller (``sees_opening``). An empty or hidden document gets -inf. Differentiable.
    """
    heads = torch.as_tensor(heads, device=query.device)
    keys_BKSD = key.index_select(1, torch.div(heads, query.shape[1] // key.shape[1], rounding_mode="floor")).float()
    rows_BR = layout.query_rows_BR
    index = rows_BR[:, None, :, None].expand(-1, len(heads), -1, query.shape[3])
    # under autocast the product would be bfloat16 again in spite of float(): log sums are sums of large numbers, and
    # ranks would be rounding
    with torch.autocast(query.device.type, enabled=False):
        logits = torch.matmul(
            query.index_select(1, heads).gather(2, index).float() * scale, keys_BKSD.transpose(-1, -2)
        )
    mask = visible_keys(layout, rows_BR, is_calibration=False, window=window)[:, None]
    segment_BS, opening = opening_and_documents(layout)
    sums_BNKR = segment_log_sums(logits.masked_fill(~mask, float("-inf")), segment_BS, opening + 1)
    # the row's normaliser cancels: what is left depends on the passage and the opening, not on how many other passages
    # stand there
    return sums_BNKR[:, :opening] - sums_BNKR[:, opening:]


def opening_and_documents(layout: BranchLayout) -> tuple[torch.Tensor, int]:
    """Segments [B, S]: documents as they are numbered, then the opening as number N, then N + 1 for everything else;
    and N.
    """
    num_documents = layout.num_documents
    owner_BS = layout.document_of_token_BS
    first_B = (owner_BS < num_documents).int().argmax(dim=1)  # the first token of any document
    is_opening_BS = torch.arange(owner_BS.shape[1], device=owner_BS.device) < first_B[:, None]
    return torch.where(
        is_opening_BS, owner_BS, torch.where(owner_BS < num_documents, owner_BS, num_documents + 1)
    ), num_documents


def head_values(
    ratios_BNKR: torch.Tensor, layout: BranchLayout, offsets_K: torch.Tensor | None, floor: float
) -> torch.Tensor:
    """s_h of each document before the weights, float32 [B, N, K], from log ratios; 0 for an empty document.
    Differentiable.
    """
    filled_BNKR = ratios_BNKR.masked_fill(is_empty_document_BN(layout)[..., None, None], 0.0)
    values = row_values(filled_BNKR, torch.zeros_like(filled_BNKR[:, 0]), offsets_K, floor)
    return mean_over_rows(values, layout.query_weights_BR)


def is_empty_document_BN(layout: BranchLayout) -> torch.Tensor:
    """Documents without a token, and places beyond the end of a shorter list."""
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    counts = torch.zeros(owner_BS.shape[0], num_documents + 1, device=owner_BS.device)
    return counts.scatter_add(1, owner_BS, torch.ones_like(owner_BS, dtype=counts.dtype))[:, :num_documents] == 0


def sees_opening(layout: BranchLayout, window: int | None) -> bool:
    """Whether every query row still sees the whole opening through a sliding window."""
    if window is None:
        return True
    return int(torch.gather(layout.position_ids_BS, 1, layout.query_rows_BR).max()) < window
