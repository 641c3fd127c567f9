"""Attention over [prefix | query branch | calibration branch] in one pass, and the few rows HeadRank reads from it.

Shapes: B batch, H query heads, G key-value groups, S sequence, D head size, K heads asked for, R query rows,
C calibration tokens. Pure tensor functions shared by the transformers engine and the Megatron core attention.

The calibration branch restarts its positions after the prefix and does not see the query branch, so the pass equals two
separate passes exactly. No S x S matrix is ever made: the context is a causal SDPA, and explicit masks exist only for
the C calibration tokens and the rows of I_q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrank.method.parallel_layout import (
    DocumentBlocks,
    batch_blocks,
    behind_opening,
    block_mask,
    block_positions,
    join_parts,
    take_blocks,
    take_tokens,
)
from headrank.method.spans import EncodedContext
from headrank.method.transfer import together_on


@dataclass(frozen=True)
class BranchLayout:
    """Where everything lies in a right-padded batch. Every context has the same calibration branch, so C is one
    number.
    """

    position_ids_BS: torch.Tensor  # restarted after the prefix in the calibration branch
    prefix_length_B: torch.Tensor
    calibration_start_B: torch.Tensor  # first calibration token; the end of the query branch
    query_rows_BR: torch.Tensor  # indices of I_q, padded with the first one
    query_weights_BR: torch.Tensor  # 1/|I_q| for real rows, 0 for padding
    calibration_rows_BC: torch.Tensor  # indices of all calibration tokens
    calibration_weights_C: torch.Tensor  # 1/|I_c| on the rows that stand for I_q, 0 elsewhere
    document_of_token_BS: torch.Tensor  # document index in prompt order; num_documents where there is none
    num_documents_B: tuple[int, ...]
    blocks: DocumentBlocks | None = None  # where documents do not see each other

    @property
    def num_documents(self) -> int:
        """The longest list of the batch."""
        return max(self.num_documents_B)

    @property
    def has_calibration(self) -> bool:
        """Whether the batch carries the calibration branch."""
        return self.calibration_rows_BC.shape[1] > 0

    def visible_to_rows(self, *, is_calibration: bool, window: int | None = None) -> torch.Tensor:
        """The mask [B, R or C, S] of what I_q, or the calibration branch, may see; made once for all layers."""
        masks: dict[tuple[bool, int | None], torch.Tensor] = self.__dict__.setdefault("_masks", {})
        if (is_calibration, window) not in masks:
            rows = self.calibration_rows_BC if is_calibration else self.query_rows_BR
            masks[is_calibration, window] = visible_keys(self, rows, is_calibration, window)
        return masks[is_calibration, window]


def batch_contexts(
    contexts: Sequence[EncodedContext],
    pad_id: int = 0,
    device: torch.device | str = "cpu",
    pad_to: int | None = None,
    *,
    is_flexible: bool = False,
) -> tuple[torch.Tensor, BranchLayout]:
    """Right-pad contexts into input_ids_BS and their layout; ``pad_to`` fixes S.

    ``is_flexible`` takes FlexAttention in the parallel layout: for training on a GPU, where its compiler's minute pays.
    """
    num_tokens = max(context.length for context in contexts)
    num_tokens = num_tokens if pad_to is None else max(pad_to, num_tokens)
    batch, num_rows = len(contexts), max(end - start for start, end in (context.query_rows for context in contexts))
    num_calibration = contexts[0].calibration_length
    assert all(context.calibration_length == num_calibration for context in contexts), (
        "one template, one calibration branch"
    )
    num_documents = max(len(context.document_spans) for context in contexts)
    ids = np.full((batch, num_tokens), pad_id, np.int64)
    positions = np.zeros((batch, num_tokens), np.int64)
    owner = np.full((batch, num_tokens), num_documents, np.int64)
    rows, weights = np.zeros((batch, num_rows), np.int64), np.zeros((batch, num_rows), np.float32)
    for index, context in enumerate(contexts):
        ids[index, : context.length] = context.input_ids
        # padding stays at 0: never beyond the model's positions
        positions[index, : context.length] = _positions(context)
        first, last = context.query_rows
        # padding repeats a real row, so that no gather leaves the sequence; its weight below stays 0
        rows[index] = first
        rows[index, : last - first] = np.arange(first, last)
        weights[index, : last - first] = 1.0 / (last - first)
        for document, (start, end) in enumerate(context.document_spans):
            owner[index, start:end] = document
    starts = np.array([context.prefix_length + context.query_length for context in contexts])
    calibration_weights = np.zeros(num_calibration, np.float32)
    if num_calibration:
        first, last = (row - int(starts[0]) for row in contexts[0].calibration_rows)
        calibration_weights[first:last] = 1.0 / (last - first)

    arrays = {
        "position_ids_BS": positions,
        "prefix_length_B": np.array([context.prefix_length for context in contexts]),
        "calibration_start_B": starts,
        "query_rows_BR": rows,
        "query_weights_BR": weights,
        "calibration_rows_BC": starts[:, None] + np.arange(num_calibration)[None, :],
        "calibration_weights_C": calibration_weights,
        "document_of_token_BS": owner,
    }
    ids_BS, *tensors = together_on(device, [ids, *arrays.values()])
    layout = BranchLayout(
        **dict(zip(arrays, tensors, strict=True)),
        num_documents_B=tuple(len(context.document_spans) for context in contexts),
        blocks=batch_blocks(contexts, num_tokens, device, is_flexible) if contexts[0].is_parallel else None,
    )
    return ids_BS, layout


def _positions(context: EncodedContext) -> np.ndarray:
    """Position ids [S]; those of the calibration branch are the query branch's."""
    if context.is_parallel:
        return block_positions(context)
    positions = np.arange(context.length)
    positions[context.prefix_length + context.query_length :] -= context.query_length
    return positions


def visible_keys(
    layout: BranchLayout, rows_BR: torch.Tensor, is_calibration: bool, window: int | None = None
) -> torch.Tensor:
    """The mask [B, R, S] of what the given rows may see: causal, and never across the two branches.

    ``window`` is the width of sliding-window attention, measured in positions.
    """
    key_index_S = torch.arange(layout.position_ids_BS.shape[1], device=rows_BR.device)
    # by index and not by position: positions restart in the calibration branch, and query rows would see its tokens
    visible = key_index_S[None, None, :] <= rows_BR[:, :, None]
    if is_calibration:
        in_query_branch_BS = (key_index_S >= layout.prefix_length_B[:, None]) & (
            key_index_S < layout.calibration_start_B[:, None]
        )
        visible = visible & ~in_query_branch_BS[:, None, :]
    if window is not None:
        position_BR = torch.gather(layout.position_ids_BS, 1, rows_BR)
        visible = visible & (position_BR[:, :, None] - layout.position_ids_BS[:, None, :] < window)
    return visible


def branched_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BranchLayout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The attention output [B, H, S, D] of query [B, H, S, D] over key and value [B, G, S, D].

    A causal pass is right for prefix and query branch; the C calibration rows are then done again with their own mask.
    """
    if layout.blocks is not None:
        return _parallel_context(query, key, value, layout, layout.blocks, scale, window)
    # the calibration rows come out wrong here, they see the query branch; cheaper to do C rows again than to give the
    # whole S x S pass a mask, which would switch the flash kernel off
    context = causal_context(query, key, value, scale, window)
    return replace_calibration_rows(context, query, key, value, layout, scale, window)


def _parallel_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BranchLayout,
    blocks: DocumentBlocks,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The same where documents see the opening and themselves only; the branches see everything before them."""
    if blocks.flexible is not None:
        return blocks.flexible.attend(query, key, value, layout.position_ids_BS, scale, window)
    first = slice(0, blocks.opening_length)
    opening = causal_context(query[:, :, first], key[:, :, first], value[:, :, first], scale, window)
    documents = []
    for group in blocks.groups:
        keys, values = (behind_opening(tensor, group, blocks.opening_length) for tensor in (key, value))
        mask = block_mask(group, blocks.opening_length, window)
        documents.append(_attend(take_blocks(query, group), keys, values, attn_mask=mask, scale=scale))
    rows_BR = torch.cat([blocks.query_branch_BR, layout.calibration_rows_BC], dim=1)
    mask_BRS = torch.cat(
        [
            visible_keys(layout, blocks.query_branch_BR, is_calibration=False, window=window),
            layout.visible_to_rows(is_calibration=True, window=window),
        ],
        dim=1,
    )
    branches = _attend_few(take_tokens(query, rows_BR), key, value, mask_BRS[:, None], scale)
    return join_parts([opening, *documents, branches], blocks)


def replace_calibration_rows(
    context: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BranchLayout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Put the right calibration rows into a context [B, H, S, D] that was computed causally over the whole sequence."""
    if not layout.has_calibration:
        return context
    rows_BC = layout.calibration_rows_BC
    index = rows_BC[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    mask = layout.visible_to_rows(is_calibration=True, window=window)[:, None]
    rows = _attend_few(query.gather(2, index), key, value, mask, scale)
    # out of place: autograd still needs the causal result
    return context.scatter(2, index[..., : value.shape[3]], rows.to(context.dtype))


def causal_context(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention, or sliding-window attention in blocks of ``window`` so that memory stays linear in S."""
    num_tokens = query.shape[2]
    if window is None or num_tokens <= window:
        return _attend(query, key, value, is_causal=True, scale=scale)
    blocks = []
    for start in range(0, num_tokens, window):
        # a row sees itself and window - 1 tokens before it
        end, first = min(start + window, num_tokens), max(0, start - window + 1)
        rows = torch.arange(start, end, device=query.device)[:, None]
        keys = torch.arange(first, end, device=query.device)[None, :]
        mask = (keys <= rows) & (rows - keys < window)
        blocks.append(
            _attend(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], attn_mask=mask, scale=scale)
        )
    return torch.cat(blocks, dim=2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    """torch's attention over key-value groups, in memory linear in S."""
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1 and _lacks_grouped_kernel(query, has_mask="attn_mask" in how):
        key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1], **how)


def _attend_few(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of few rows [B, H, R, D] under a mask [B, 1, R, S].

    On a GPU two products a key-value group and a softmax of R x S: torch's masked kernel would need keys and values
    repeated for every head, and give few rows to as few multiprocessors. Logits are float32, as inside every fused
    kernel.
    """
    if not _lacks_grouped_kernel(query, has_mask=True):
        return _attend(query, key, value, attn_mask=mask, scale=scale)
    heads_and_rows = (query.shape[1] // key.shape[1], query.shape[2])
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, G, heads of a group * R, D]
    logits = torch.matmul(grouped.float() * scale, key.float().transpose(-1, -2)).unflatten(2, heads_and_rows)
    probabilities = logits.masked_fill(~mask[:, :, None], float("-inf")).softmax(dim=-1).to(value.dtype)
    return torch.matmul(probabilities.flatten(2, 3), value).unflatten(2, heads_and_rows).flatten(1, 2)


def _lacks_grouped_kernel(query: torch.Tensor, *, has_mask: bool) -> bool:
    """CUDA's flash kernel alone knows groups, and neither float32 nor masks: there grouped attention would make S x
    S matrices.
    """
    return query.is_cuda and (has_mask or query.dtype == torch.float32)


def mean_row_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    layout: BranchLayout,
    heads: torch.Tensor | Sequence[int],
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A_t of the paper: the attention of I_q averaged over its rows, for the heads asked for, in float32.

    Returns the query branch's [B, K, S] and the calibration branch's (None without calibration). Differentiable.
    """
    heads = torch.as_tensor(heads, device=query.device)
    group_size = query.shape[1] // key.shape[1]
    keys_BKSD = key.index_select(1, torch.div(heads, group_size, rounding_mode="floor")).float()
    # the wanted heads only, before any product: all heads of a layer would cost R x S for each of them
    query = query.index_select(1, heads)

    def average(rows_BR: torch.Tensor, weights: torch.Tensor, is_calibration: bool) -> torch.Tensor:
        index = rows_BR[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        # float32: a softmax over thousands of keys in bfloat16 rounds most masses to nothing, and scores differ by
        # hundredths
        logits = torch.matmul(query.gather(2, index).float() * scale, keys_BKSD.transpose(-1, -2))
        mask = layout.visible_to_rows(is_calibration=is_calibration, window=window)[:, None]
        probabilities = logits.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bkrs,br->bks", probabilities, weights)

    query_BKS = average(layout.query_rows_BR, layout.query_weights_BR, is_calibration=False)
    if not layout.has_calibration:
        return query_BKS, None
    weights_BC = layout.calibration_weights_C.expand(layout.calibration_rows_BC.shape[0], -1)
    return query_BKS, average(layout.calibration_rows_BC, weights_BC, is_calibration=True)
