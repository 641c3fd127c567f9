"""The parallel layout in one kernel: torch's FlexAttention with a mask of blocks, on GPUs.

The plain way (attention.py) gathers documents of similar length, attends to each group and puts the parts back
together. On a GPU the gradient of every gather is a sort and an accumulation. Here nothing is moved: one kernel over
the whole sequence leaves out the tiles that nobody sees.

Shapes: B batch, H query heads, G key-value groups, S sequence, D head size, T tiles of a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrank.method.transfer import together_on

TILE = 128  # FlexAttention's own
QUERY_BRANCH = 1 << 20  # beyond any number of documents
CALIBRATION_BRANCH, PADDING = QUERY_BRANCH + 1, QUERY_BRANCH + 2


@dataclass(frozen=True)
class FlexibleMask:
    """Who sees whom: the segment of every token, ascending along a context, and the tiles of keys that each tile of
    queries needs.

    Segment 0 is the opening, then come the blocks from 1 on, then the branches. A token sees the opening, its own
    segment and, from a branch, every block; never what comes after it.
    """

    segment_BS: torch.Tensor
    num_tiles_B1T: torch.Tensor
    tiles_B1TT: torch.Tensor
    num_visible: int  # tiles of all contexts together: what the kernel works through
    _masks: dict[int | None, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, segment_BS: np.ndarray, device: torch.device | str) -> FlexibleMask:
        """From the segments on the host."""
        num_tiles, tiles = visible_tiles(segment_BS)
        segments, counts, seen = together_on(device, [segment_BS, num_tiles[:, None], tiles[:, None]])
        return cls(segments, counts, seen, int(num_tiles.sum()))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids_BS: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """The context [B, H, S, D] of query [B, H, S, D] over key and value [B, G, S, D]; ``window`` is measured in
        positions.
        """
        mask = self._block_mask(position_ids_BS, window)
        return _kernel(query.device.type)(
            query, key, value, block_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )

    def _block_mask(self, position_ids_BS: torch.Tensor, window: int | None) -> Any:
        """FlexAttention's own object, made once for all layers."""
        from torch.nn.attention.flex_attention import BlockMask

        if window not in self._masks:
            length = self.segment_BS.shape[1]
            self._masks[window] = BlockMask.from_kv_blocks(
                self.num_tiles_B1T,
                self.tiles_B1TT,
                BLOCK_SIZE=TILE,
                mask_mod=_visibility(self.segment_BS, position_ids_BS, window),
                seq_lengths=(length, length),
            )
        return self._masks[window]


def visible_tiles(segment_BS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many tiles of keys each tile of queries may need, [B, T], and which, [B, T, T] with these first; the mask
    decides inside them.
    """
    length = segment_BS.shape[1]
    ends = np.arange(TILE, length + TILE, TILE).clip(max=length) - 1
    lowest, highest = segment_BS[:, : ends[-1] + 1 : TILE], segment_BS[:, ends]
    tile = np.arange(len(ends))
    # tiles and not tokens: a tile that holds any opening token may be needed by all; too many tiles cost time, one too
    # few is wrong
    has_opening = (lowest == 0)[:, None, :]
    is_branch = (highest >= QUERY_BRANCH)[:, :, None]
    shares_segment = highest[:, None, :] >= lowest[:, :, None]
    visible = (tile[None, :] <= tile[:, None])[None] & (has_opening | is_branch | shares_segment)
    # stable: FlexAttention takes the first num_tiles entries, which must be the visible ones in ascending order
    return visible.sum(axis=2).astype(np.int32), np.argsort(~visible, axis=2, kind="stable").astype(np.int32)


def _visibility(
    segment_BS: torch.Tensor, position_ids_BS: torch.Tensor, window: int | None
) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask_mod: whether query token q of context b sees key token k."""

    def sees(b: torch.Tensor, _: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own, other = segment_BS[b, q], segment_BS[b, k]
        is_document = other < QUERY_BRANCH
        # PADDING is above both branches: its rows see every document, and nobody reads them
        visible = (k <= q) & ((other == 0) | (other == own) | ((own >= QUERY_BRANCH) & is_document))
        return visible if window is None else visible & (position_ids_BS[b, q] - position_ids_BS[b, k] < window)

    return sees


@functools.cache
def _kernel(device_type: str) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled on a GPU for all lengths at once: without that it makes an S x S matrix."""
    from torch.nn.attention.flex_attention import flex_attention

    # with return_lse it gives a pair; we do not ask
    kernel: Callable[..., torch.Tensor] = flex_attention  # type: ignore[assignment]
    return torch.compile(kernel, dynamic=True) if device_type == "cuda" else kernel
