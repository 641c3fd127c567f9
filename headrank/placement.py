"""Where a model runs and in which numbers, when the user does not say: the method's one question about GPUs."""

from __future__ import annotations

import os

import torch

from headrank.errors import InputError


def place(device: str | torch.device | None, dtype: str | torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """The device (CUDA where there is one) and the number format (float32 on a CPU, else bfloat16).

    Processes that torchrun started on one machine get a GPU each, in turn; ``cuda:1`` is that one for all of them.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"--device {device!r} is not a device; give cpu, cuda, cuda:1 or mps") from None
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if (chosen.index or 0) >= count:
            raise InputError(f"--device {chosen}: this machine (or this build of torch) has {count} CUDA devices; give another or cpu")
        chosen = chosen if chosen.index is not None else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % count)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("--device mps: this machine (or this build of torch) has none; give cpu")
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise InputError(f"--dtype {dtype!r} is not a number format; give float32, bfloat16 or float16")
    return chosen, named or (torch.float32 if chosen.type == "cpu" else torch.bfloat16)
