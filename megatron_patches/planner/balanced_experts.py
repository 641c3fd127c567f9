"""A mixture of experts as the planner sees it: every expert gets as many tokens as every other.

Where tokens go is decided by numbers, which a rehearsal does not have. The router, the two exchanges between ranks and
the products of this rank's experts are the real ones; a router out of balance makes one rank slower and larger than
this.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all


def balanced_experts(layer: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """In the place of MoELayer.forward: [S, B, E] -> the same."""
    tokens_TE = hidden_states.flatten(0, 1)
    probabilities, _ = layer.router(hidden_states)
    chosen = layer.config.moe_router_topk
    weights_Tk = torch.topk(probabilities.flatten(0, -2), chosen, dim=-1).values
    # as many copies leave as arrive; sorted by expert, as the real dispatcher's are
    copies = tokens_TE.repeat_interleave(chosen, dim=0)
    arrived = all_to_all(layer.ep_group, copies)
    experts = layer.experts.local_experts
    per_expert = -(-arrived.shape[0] // len(experts))
    parts = [expert(part, None)[0] for expert, part in zip(experts, arrived.split(per_expert), strict=False)]
    returned = all_to_all(layer.ep_group, torch.cat(parts))
    combined = (returned.unflatten(0, (-1, chosen)) * weights_Tk[..., None].to(returned.dtype)).sum(dim=1)
    return combined.view_as(hidden_states), None
