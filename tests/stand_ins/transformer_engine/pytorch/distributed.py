"""What Megatron-Core subclasses or passes on."""

import torch


class CudaRNGStatesTracker:
    pass


def checkpoint(function, *arguments, **_):
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)
