"""The base class that Megatron-Core asks modules about."""

import torch

from transformer_engine.pytorch import _Module as TransformerEngineBaseModule  # noqa: F401


def get_dummy_wgrad(shape, dtype, zero=False):
    return torch.zeros(shape, dtype=dtype)
