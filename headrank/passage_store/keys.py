"""Between the keys that a model computes and the numbers that a store keeps: pooling, int8, bf16, fp32.

Shapes: A key pairs, T tokens of a passage, P pool, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrank.passage_store.segment import NUMPY_TYPE
from headrank.passage_store.store import Scales

LARGEST = 127
HEADROOM = 1.05  # the sample's largest deviation stands a little below the largest integer


def pool_tokens(keys_ATD: torch.Tensor, pool: int) -> torch.Tensor:
    """The mean of every ``pool`` neighbouring tokens' keys [A, ceil(T / P), D]; the last mean may be of fewer."""
    if pool == 1 or keys_ATD.shape[1] == 0:
        return keys_ATD
    num_tokens = keys_ATD.shape[1]
    full = num_tokens // pool * pool
    means = keys_ATD[:, :full].unflatten(1, (-1, pool)).mean(2)
    return torch.cat([means, keys_ATD[:, full:].mean(1, keepdim=True)], dim=1) if full < num_tokens else means


def measure_scales(sample: Sequence[torch.Tensor], pool: int = 1) -> Scales:
    """Scale (of int8) and centre (of every format: where logits are measured from) per pair and channel, from some
    passages' keys.

    Models add large constants to some channels (biases, slow rotary frequencies); centred, the integers are spent on
    what differs.
    """
    keys_ATD = torch.cat([pool_tokens(keys.float(), pool) for keys in sample], dim=1)
    low, high = keys_ATD.amin(1), keys_ATD.amax(1)
    scale_AD = ((high - low) / 2 * HEADROOM / LARGEST).clamp_min(1e-8)
    return Scales(scale_AD.cpu().numpy(), ((high + low) / 2).cpu().numpy())


@dataclass(frozen=True)
class StoredForm:
    """Turns keys into the numbers of one store, and back."""

    dtype: str
    pool: int
    scales: Scales

    def encode(self, keys_ATD: torch.Tensor) -> tuple[np.ndarray, int]:
        """The stored numbers [A, T / P, D] (bf16 as its bits) and how many did not fit the int8 scale and were cut
        to the largest.
        """
        pooled = pool_tokens(keys_ATD.float(), self.pool).cpu()
        if self.dtype == "bf16":
            return pooled.bfloat16().contiguous().view(torch.int16).numpy().view(NUMPY_TYPE["bf16"]), 0
        if self.dtype == "fp32":
            return pooled.contiguous().numpy().astype(NUMPY_TYPE["fp32"], copy=False), 0
        scale_A1D, centre_A1D = (
            torch.from_numpy(values.copy())[:, None] for values in (self.scales.scale_AD, self.scales.centre_AD)
        )
        integers = ((pooled - centre_A1D) / scale_A1D).round_()
        saturated = int((integers.abs() > LARGEST).sum())
        return integers.clamp_(-LARGEST, LARGEST).to(torch.int8).numpy(), saturated

    def decode(self, stored_ATD: np.ndarray) -> torch.Tensor:
        """Keys in float32; a copy."""
        if self.dtype == "bf16":
            return torch.from_numpy(stored_ATD.view(np.int16).copy()).view(torch.bfloat16).float()
        keys = torch.from_numpy(stored_ATD.astype(np.float32))
        if self.dtype == "fp32":
            return keys
        return (
            keys * torch.from_numpy(self.scales.scale_AD.copy())[:, None]
            + torch.from_numpy(self.scales.centre_AD.copy())[:, None]
        )
