"""Documents that do not see each other: each attends to the prompt's opening and to itself, all at the same positions.

In a sequential prompt a document's place decides its distance from the query and what it has read before; scores then
lean on places, the more the longer the prompt. Here every document begins at the position after the opening and the
branches begin after the longest one, so that no order of the list changes a score, and a longer list brings no greater
distance.

Shapes: B batch, H query heads, G key-value groups, S sequence, D head size, M blocks of one group, T tokens of its
longest, P tokens of the opening, R rows of the branches. The tokens of one document with what follows it are its
*block*; blocks of similar length are attended to together, so that one long document does not make all others as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrank.method.flexible_attention import CALIBRATION_BRANCH, PADDING, QUERY_BRANCH, FlexibleMask
from headrank.method.spans import EncodedContext
from headrank.method.transfer import together_on

_MAX_PADDING = 2  # times its tokens that a block may take up in its group


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of similar length from all contexts of a batch."""

    tokens_MT: torch.Tensor  # flat index (context * S + token) of each block's tokens, padded at its end with its first
    context_M: torch.Tensor  # the context of each block


@dataclass(frozen=True)
class DocumentBlocks:
    """Where the blocks of a batch lie. The opening is the same text in every context, so P is one number."""

    opening_length: int
    groups: tuple[BlockGroup, ...]
    query_branch_BR: torch.Tensor  # index of the query branch's tokens, padded with its first
    place_BS: torch.Tensor  # of each token among [openings, groups one after another, branches]: see join_parts
    flexible: FlexibleMask | None = None  # for training on a GPU, where nothing is gathered


def block_positions(context: EncodedContext) -> np.ndarray:
    """Position ids [S]: all blocks begin after the opening, both branches after the longest block."""
    positions = np.arange(context.length)
    bounds = block_bounds(context)
    for start, end in bounds:
        positions[start:end] = bounds[0][0] + np.arange(end - start)
    # behind the longest block: a branch that overlapped a block would read its last tokens at negative distances, which
    # no training has seen
    branches = bounds[0][0] + max(end - start for start, end in bounds)
    second = context.prefix_length + context.query_length
    positions[context.prefix_length : second] = branches + np.arange(context.query_length)
    positions[second:] = branches + np.arange(context.calibration_length)
    return positions


def block_bounds(context: EncodedContext) -> list[tuple[int, int]]:
    """The token range of each block: from the document's first token to that of the next."""
    starts = [start for start, _ in context.document_spans]
    # to the next document's first token and not to the span's end: the line ends between documents belong to the block
    # before them
    return list(zip(starts, [*starts[1:], context.prefix_length], strict=True))


def batch_blocks(
    contexts: Sequence[EncodedContext], num_tokens: int, device: torch.device | str, is_flexible: bool = False
) -> DocumentBlocks:
    """The blocks of contexts that are padded to ``num_tokens``; ``is_flexible`` prepares FlexAttention for them."""
    bounds = [block_bounds(context) for context in contexts]
    opening = bounds[0][0][0]
    assert all(blocks[0][0] == opening for blocks in bounds), "one template, one opening"
    place = np.zeros((len(contexts), num_tokens), np.int64)
    place[:, :opening] = np.arange(len(contexts) * opening).reshape(len(contexts), opening)
    filled, groups = len(contexts) * opening, []
    for group in _similar(
        [(end - start, index, start) for index, blocks in enumerate(bounds) for start, end in blocks]
    ):
        longest = group[-1][0]
        tokens = np.empty((len(group), longest), np.int64)
        for row, (length, index, start) in enumerate(group):
            # padding is the block's first token again: a real index, and its result is taken by nobody
            tokens[row] = index * num_tokens + start
            tokens[row, :length] += np.arange(length)
            # padded places are skipped: 'filled' grows by whole rows, places only by real tokens
            place[index, start : start + length] = filled + row * longest + np.arange(length)
        filled += tokens.size
        groups.append((tokens, np.array([index for _, index, _ in group])))
    num_query = max(context.query_length for context in contexts)
    num_rows = num_query + contexts[0].calibration_length
    rows = np.empty((len(contexts), num_query), np.int64)
    for index, context in enumerate(contexts):
        first, second = context.prefix_length, context.prefix_length + context.query_length
        rows[index] = first
        rows[index, : context.query_length] = np.arange(first, second)
        branches = filled + index * num_rows
        place[index, first:second] = branches + np.arange(context.query_length)
        place[index, second : context.length] = branches + num_query + np.arange(context.calibration_length)

    rows_BR, place_BS, *parts = together_on(device, [rows, place, *(part for group in groups for part in group)])
    flexible = FlexibleMask.of(segments(contexts, num_tokens), device) if is_flexible else None
    return DocumentBlocks(opening, tuple(map(BlockGroup, parts[0::2], parts[1::2])), rows_BR, place_BS, flexible)


def segments(contexts: Sequence[EncodedContext], num_tokens: int) -> np.ndarray:
    """The segment of every token [B, S]: see FlexibleMask."""
    segment = np.full((len(contexts), num_tokens), PADDING, np.int32)
    for row, context in zip(segment, contexts, strict=True):
        bounds, second = block_bounds(context), context.prefix_length + context.query_length
        row[: bounds[0][0]] = 0
        for number, (start, end) in enumerate(bounds, start=1):
            row[start:end] = number
        row[context.prefix_length : second] = QUERY_BRANCH
        row[second : context.length] = CALIBRATION_BRANCH
    return segment


def _similar(blocks: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Blocks (length first) in groups from short to long, none more than _MAX_PADDING times as long as another."""
    groups: list[list[tuple[int, int, int]]] = []
    # sorted, so that a group holds similar lengths: one long document must not pad a hundred short ones to its length
    for block in sorted(blocks):
        if not groups or block[0] > _MAX_PADDING * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(block)
    return groups


def take_tokens(values: torch.Tensor, index_BR: torch.Tensor) -> torch.Tensor:
    """The tokens [B, H, R, D] of values [B, H, S, D], each context its own."""
    return values.gather(2, index_BR[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))


def take_blocks(values: torch.Tensor, group: BlockGroup) -> torch.Tensor:
    """A group's blocks [M, H, T, D] of values [B, H, S, D]."""
    return values.transpose(0, 1).flatten(1, 2)[:, group.tokens_MT].transpose(0, 1)


def behind_opening(values: torch.Tensor, group: BlockGroup, opening_length: int) -> torch.Tensor:
    """A group's blocks, each behind the opening of its context: [M, G, P + T, D]."""
    return torch.cat([values[group.context_M, :, :opening_length], take_blocks(values, group)], dim=2)


def block_mask(group: BlockGroup, opening_length: int, window: int | None = None) -> torch.Tensor:
    """What a block's tokens may see of [opening, block]: [T, P + T]; padding stands at the end, where nobody looks."""
    longest, device = group.tokens_MT.shape[1], group.tokens_MT.device
    rows = opening_length + torch.arange(longest, device=device)[:, None]
    keys = torch.arange(opening_length + longest, device=device)[None, :]
    visible = keys <= rows
    return visible if window is None else visible & (rows - keys < window)


def join_parts(parts: Sequence[torch.Tensor], blocks: DocumentBlocks) -> torch.Tensor:
    """The context [B, H, S, D] from its parts: openings [B, H, P, D], each group's [M, H, T, D], branches [B, H, R,
    D].
    """
    # one gather for all parts: writing each into place would need a buffer that autograd has to copy for every write
    flat = torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts], dim=1)
    return flat[:, blocks.place_BS].transpose(0, 1)
