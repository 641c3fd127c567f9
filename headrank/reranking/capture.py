"""The attention function registered with transformers: context as always, plus the rows HeadRank reads.

Every decoder family of transformers calls a registered function with Q, K and V after rotary embedding and norms, so one
function serves them all and no modelling file is forked. What to capture and what was captured travel in one explicit
object that lives for one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrank.errors import InputError
from headrank.method.attention import BranchLayout, branched_context, mean_row_probabilities

IMPLEMENTATION = "headrank"


class ExitEarly(Exception):
    """Raised inside layer l_max once its rows are read: nothing above is needed."""


@dataclass
class Capture:
    """What one forward should read (heads per layer) and what it read: layer -> averaged rows [B, K, S].

    ``last_layer`` stops the forward inside that layer; None runs to the end.
    """

    layout: BranchLayout
    heads_by_layer: Mapping[int, Sequence[int]]
    last_layer: int | None = None
    query_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    calibration_rows: dict[int, torch.Tensor] = field(default_factory=dict)


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
    headrank: Capture | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Branch-aware attention; with the layer in ``headrank.heads_by_layer`` its rows are captured on the way."""
    if headrank is None:
        raise RuntimeError("the 'headrank' attention needs a Capture: call the model through HeadRankReranker")
    if softcap is not None or s_aux is not None:
        raise InputError("this model caps its attention logits or has attention sinks; HeadRank does not reproduce that")
    if not getattr(module, "is_causal", True):
        raise InputError("this model reads in both directions (an encoder); HeadRank needs a causal decoder")
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = headrank.heads_by_layer.get(layer)
    if heads is not None:
        rows, calibration = mean_row_probabilities(query, key, headrank.layout, heads, scale, sliding_window)
        headrank.query_rows[layer] = rows
        if calibration is not None:
            headrank.calibration_rows[layer] = calibration
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
