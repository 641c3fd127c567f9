"""The attention function registered with transformers: context as always, plus the rows HeadRank reads.

Every decoder family of transformers calls a registered function with Q, K and V after rotary embedding and norms, so
one function serves them all and no modelling file is forked. What to capture and what was captured travel in one
explicit object that lives for one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from headrank.errors import InputError
from headrank.method.attention import BranchLayout, branched_context, mean_row_probabilities
from headrank.method.log_mass import row_log_ratios, sees_opening

IMPLEMENTATION = "headrank"


class ExitEarly(Exception):
    """Raised inside layer l_max once its rows are read: nothing above is needed."""


@dataclass
class Capture:
    """What one forward should read (heads per layer) and what it read: layer -> averaged rows [B, K, S].

    ``last_layer`` stops the forward inside that layer; None runs to the end. ``reads`` says what is wanted of the rows:
    masses, log ratios [B, N, K, R], or both.
    """

    layout: BranchLayout
    heads_by_layer: Mapping[int, Sequence[int]]
    last_layer: int | None = None
    reads: frozenset[str] = frozenset({"mass"})
    log_ratios: dict[int, torch.Tensor] = field(default_factory=dict)
    query_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    calibration_rows: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class LateForward:
    """What one forward stands behind (keys and values of the opening, per layer) and what it should keep.

    ``attend`` is called by the registered attention function in every layer.
    """

    last_layer: int
    opening: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    groups_by_layer: Mapping[int, Sequence[int]] = field(default_factory=dict)
    heads_by_layer: Mapping[int, Sequence[int]] = field(default_factory=dict)
    rows: slice = field(default_factory=lambda: slice(None))
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # [B, g, T, D]
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)  # [B, h, R, D], times the scale
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # of the opening's own forward
    visible: torch.Tensor | None = None  # [T, O + T], made in the first layer

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Keep what is asked for, leave in the deepest layer, else attend to the opening and the row itself: [B, H,
        T, D].
        """
        if layer in self.groups_by_layer:
            # indexed by a list, which copies: a view would keep the keys of all groups of the layer alive
            self.keys[layer] = key[:, list(self.groups_by_layer[layer])]
        if layer in self.heads_by_layer:
            self.vectors[layer] = query[:, list(self.heads_by_layer[layer]), self.rows] * scale
        if self.opening is None:
            self.made[layer] = (key, value)
        if layer == self.last_layer:
            raise ExitEarly
        num_tokens, num_opening = key.shape[2], 0
        if self.opening is not None:
            # expand() shares one opening among all rows; nothing writes into it
            opening_key, opening_value = (tensor.expand(key.shape[0], -1, -1, -1) for tensor in self.opening[layer])
            num_opening = opening_key.shape[2]
            key, value = torch.cat([opening_key, key], dim=2), torch.cat([opening_value, value], dim=2)
        # tril's diagonal moved by the opening: every token sees all of it, and the passage up to itself
        if self.visible is None:
            self.visible = torch.ones(num_tokens, num_opening + num_tokens, dtype=torch.bool, device=key.device).tril(
                num_opening
            )
        group_size = query.shape[1] // key.shape[1]
        if group_size > 1 and query.is_cuda:  # no CUDA kernel knows both groups and masks: it would make S x S matrices
            key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
        is_grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.visible, scale=scale, enable_gqa=is_grouped
        )


def headrank_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    headrank: Capture | LateForward | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Branch-aware attention; with the layer in ``headrank.heads_by_layer`` its rows are captured on the way."""
    if headrank is None:
        raise RuntimeError("the 'headrank' attention needs a Capture: call the model through HeadRankReranker")
    # both change every probability; a score without them would be a number of another model
    if softcap is not None or s_aux is not None:
        raise InputError(
            "this model caps its attention logits or has attention sinks; HeadRank does not reproduce that"
        )
    if not getattr(module, "is_causal", True):
        raise InputError("this model reads in both directions (an encoder); HeadRank needs a causal decoder")
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(headrank, LateForward):
        return headrank.attend(layer, query, key, value, scale).transpose(1, 2), None
    heads = headrank.heads_by_layer.get(layer)
    if heads is not None and "log-mass" in headrank.reads:
        if not sees_opening(headrank.layout, sliding_window):
            raise InputError(
                "a sliding window of this model hides the opening from the query; log masses need shorter lists or "
                "passages"
            )
        headrank.log_ratios[layer] = row_log_ratios(query, key, headrank.layout, heads, scale, sliding_window)
    if heads is not None and "mass" in headrank.reads:
        rows, calibration = mean_row_probabilities(query, key, headrank.layout, heads, scale, sliding_window)
        headrank.query_rows[layer] = rows
        if calibration is not None:
            headrank.calibration_rows[layer] = calibration
    # raised before the context is computed: of the deepest layer only queries and keys are needed
    if layer == headrank.last_layer:
        raise ExitEarly
    context = branched_context(query, key, value, headrank.layout, scale, sliding_window)
    return context.transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The layout says what is visible; transformers need not build an S x S mask."""
    return


def register() -> str:
    """Register the function with transformers (idempotent) and return the implementation's name."""
    from transformers import AttentionInterface, AttentionMaskInterface  # seconds that a plain decoder never spends

    AttentionInterface.register(IMPLEMENTATION, headrank_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    return IMPLEMENTATION
