"""Which of torchrun's processes this one is, and waiting for the others; without torchrun there is one and nobody waits."""

from __future__ import annotations

import datetime
import os

LONGEST_WAIT = datetime.timedelta(days=7)  # shares are uneven, and torchrun itself ends the others when one process dies


def world() -> tuple[int, int]:
    """(rank, world size) under torchrun, with the group made; else (0, 1)."""
    rank, world_size = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    if world_size > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    return rank, world_size


def barrier(world_size: int, last: bool = False) -> None:
    """Wait for every process; the last barrier also says goodbye."""
    if world_size > 1:
        import torch.distributed as dist

        dist.barrier()
        if last:
            dist.destroy_process_group()
