"""Where a model runs and in which numbers, when the user does not say: the method's one question about GPUs."""

from __future__ import annotations

import torch


def place(device: str | torch.device | None, dtype: str | torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """The device (CUDA where there is one) and the number format (float32 on a CPU, else bfloat16)."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    named = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return chosen, named or (torch.float32 if chosen.type == "cpu" else torch.bfloat16)
