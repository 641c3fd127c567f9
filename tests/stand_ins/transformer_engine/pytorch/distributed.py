"""What Megatron-Core subclasses or passes on."""

import torch


def activation_recompute_forward(*_, **__):
    raise NotImplementedError("FP8 only")


class CudaRNGStatesTracker:
    pass


def checkpoint(function, *arguments, **_):
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)
