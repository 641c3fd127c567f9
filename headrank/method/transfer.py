"""Arrays of a batch to where they are computed with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch


def together_on(device: torch.device | str, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The arrays as tensors on a device. To a GPU goes one copy for each type, from pinned memory: it waits for none
    of them.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(values)) for values in arrays]
    if torch.device(device).type == "cpu":
        return tensors
    by_type: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_type[tensor.dtype].append(index)
    for indices in by_type.values():
        packed = torch.cat([tensors[index].flatten() for index in indices])
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()
        parts = packed.to(device, non_blocking=True).split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            tensors[index] = part.view(tensors[index].shape)
    return tensors
