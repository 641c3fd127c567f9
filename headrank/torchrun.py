"""Which of torchrun's processes this one is, and waiting for the others; without torchrun there is one and nobody
waits.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import TypeVar

from headrank.errors import InputError

Result = TypeVar("Result")

# shares are uneven, and torchrun itself ends the others when one process dies
LONGEST_WAIT = datetime.timedelta(days=7)


def world() -> tuple[int, int]:
    """(rank, world size) under torchrun, with the group made; else (0, 1)."""
    rank, world_size = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    if world_size > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    return rank, world_size


def first_process_does(work: Callable[[], Result]) -> Result | None:
    """What the first process makes, while the others wait and get None. Its InputError is everybody's: no process
    hangs or dies of it.
    """
    rank, world_size = world()
    result: Result | None = None
    reason: list[str | None] = [None]
    if rank == 0:
        try:
            result = work()
        except InputError as error:
            reason = [str(error)]
    if world_size > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(reason, src=0)
    if reason[0] is not None:
        raise InputError(reason[0])
    return result


def barrier(world_size: int, last: bool = False) -> None:
    """Wait for every process; the last barrier also says goodbye."""
    if world_size > 1:
        import torch.distributed as dist

        dist.barrier()
        if last:
            dist.destroy_process_group()
