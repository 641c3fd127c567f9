"""Documents that do not see each other: each attends to the prompt's opening and to itself, all at the same positions.

In a sequential prompt a document's place decides its distance from the query and what it has read before; scores then lean on
places, the more the longer the prompt. Here every document begins at the position after the opening and the branches begin
after the longest one, so that no order of the list changes a score, and a longer list brings no greater distance.

Shapes: B batch, H query heads, G key-value groups, S sequence, D head size, N documents, T tokens of the longest document,
P tokens of the opening, R rows of the branches. The tokens of one document with what follows it are its *block*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrank.spans import EncodedContext


@dataclass(frozen=True)
class DocumentBlocks:
    """Where the blocks of a batch lie. The opening is the same text in every context, so P is one number."""

    opening_length: int
    tokens_BNT: torch.Tensor  # index of each block's tokens, padded with 0 at its end
    query_branch_BR: torch.Tensor  # index of the query branch's tokens, padded with its first
    place_BS: torch.Tensor  # of each token among [opening, blocks one after another, query branch, calibration branch]


def block_positions(context: EncodedContext) -> np.ndarray:
    """Position ids [S]: blocks side by side after the opening, both branches after the longest block."""
    positions = np.arange(context.length)
    bounds = block_bounds(context)
    for start, end in bounds:
        positions[start:end] = bounds[0][0] + np.arange(end - start)
    branches = bounds[0][0] + max(end - start for start, end in bounds)
    second = context.prefix_length + context.query_length
    positions[context.prefix_length : second] = branches + np.arange(context.query_length)
    positions[second:] = branches + np.arange(context.calibration_length)
    return positions


def block_bounds(context: EncodedContext) -> list[tuple[int, int]]:
    """The token range of each block: from the document's first token to that of the next."""
    starts = [start for start, _ in context.document_spans]
    return list(zip(starts, [*starts[1:], context.prefix_length], strict=True))


def batch_blocks(contexts: Sequence[EncodedContext], num_tokens: int, device: torch.device | str) -> DocumentBlocks:
    """The blocks of contexts that are padded to ``num_tokens``."""
    bounds = [block_bounds(context) for context in contexts]
    opening = bounds[0][0][0]
    assert all(blocks[0][0] == opening for blocks in bounds), "one template, one opening"
    num_documents, longest = max(map(len, bounds)), max(end - start for blocks in bounds for start, end in blocks)
    num_rows = max(context.query_length for context in contexts)
    tokens = np.zeros((len(contexts), num_documents, longest), np.int64)
    rows = np.zeros((len(contexts), num_rows), np.int64)
    place = np.zeros((len(contexts), num_tokens), np.int64)
    after_blocks = opening + num_documents * longest
    for index, (context, blocks) in enumerate(zip(contexts, bounds, strict=True)):
        first, second = context.prefix_length, context.prefix_length + context.query_length
        place[index, :opening] = np.arange(opening)
        for document, (start, end) in enumerate(blocks):
            tokens[index, document, : end - start] = np.arange(start, end)
            place[index, start:end] = opening + document * longest + np.arange(end - start)
        rows[index] = first
        rows[index, : context.query_length] = np.arange(first, second)
        place[index, first:second] = after_blocks + np.arange(context.query_length)
        place[index, second : context.length] = after_blocks + num_rows + np.arange(context.calibration_length)
    return DocumentBlocks(opening, *(torch.from_numpy(values).to(device) for values in (tokens, rows, place)))


def take_tokens(values: torch.Tensor, index_BT: torch.Tensor) -> torch.Tensor:
    """The tokens [B, H, T, D] of values [B, H, S, D]."""
    return values.gather(2, index_BT[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))


def split_blocks(values: torch.Tensor, blocks: DocumentBlocks, *, with_opening: bool) -> torch.Tensor:
    """Values [B, H, S, D] as a batch of blocks [B * N, H, (P +) T, D], each behind a copy of the opening when asked for."""
    num_documents, longest = blocks.tokens_BNT.shape[1:]
    split = take_tokens(values, blocks.tokens_BNT.flatten(1)).unflatten(2, (num_documents, longest)).transpose(1, 2)
    if with_opening:
        opening = values[:, None, :, : blocks.opening_length].expand(-1, num_documents, -1, -1, -1)
        split = torch.cat([opening, split], dim=3)
    return split.flatten(0, 1)


def block_mask(blocks: DocumentBlocks, window: int | None = None) -> torch.Tensor:
    """What a block's tokens may see of [opening, block]: [T, P + T]; padding stands at the end, where nobody looks."""
    longest, opening = blocks.tokens_BNT.shape[2], blocks.opening_length
    rows = opening + torch.arange(longest, device=blocks.tokens_BNT.device)[:, None]
    keys = torch.arange(opening + longest, device=blocks.tokens_BNT.device)[None, :]
    visible = keys <= rows
    return visible if window is None else visible & (rows - keys < window)


def join_blocks(opening: torch.Tensor, split: torch.Tensor, branches: torch.Tensor, blocks: DocumentBlocks) -> torch.Tensor:
    """The inverse of ``split_blocks`` with the other parts: contexts of opening, blocks and branches as [B, H, S, D]."""
    batch, num_documents, _ = blocks.tokens_BNT.shape
    documents = split.unflatten(0, (batch, num_documents)).transpose(1, 2).flatten(2, 3)
    return take_tokens(torch.cat([opening, documents, branches], dim=2), blocks.place_BS)
