"""A hash over every tensor of a run's checkpoint: what "bit for bit" means. Run as a job of the forge."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Write the digest of the checkpoint of iteration argv[1] under argv[0] to argv[2]."""
    import torch
    from megatron.core import dist_checkpointing

    from megatron_patches import device
    from megatron_patches.checkpoints.files import iteration_directory

    device.initialize(1)
    directory = iteration_directory(argv[0], int(argv[1]))
    tensors = dist_checkpointing.load_plain_tensors(str(directory))
    digest = hashlib.sha256()
    for name, value in sorted(_flat(tensors), key=lambda item: item[0]):
        digest.update(name.encode())
        digest.update(
            value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if value.dim()
            else repr(value.item()).encode()
        )
    Path(argv[2]).write_text(digest.hexdigest())
    device.shutdown()
    return 0


def _flat(tree: object, prefix: str = "") -> list:
    import torch

    if isinstance(tree, torch.Tensor):
        return [(prefix, tree)]
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}.{key}")]
    if isinstance(tree, (list, tuple)):
        return [pair for key, value in enumerate(tree) for pair in _flat(value, f"{prefix}.{key}")]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
