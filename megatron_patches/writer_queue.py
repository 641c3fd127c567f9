"""The queue server of Megatron's checkpoint writer, made so that it never outlives its trainer.

Megatron-Core starts a manager process for the results of its writers, once per trainer, and keeps it in a module variable.
A trainer that is killed (SIGKILL, out of memory) leaves that process behind for ever, some 190 MB each time. We put a queue
of our own into the variable first: the same manager, told to die with its parent.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from multiprocessing.managers import SyncManager

from megatron.core.dist_checkpointing.strategies import filesystem_async

_PR_SET_PDEATHSIG = 1
_manager: SyncManager | None = None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def prepare_writer_queue() -> None:
    """Give Megatron's writer its results queue; does nothing when there is one already."""
    global _manager
    if filesystem_async._results_queue is None:
        _manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        _manager.start(initializer=die_with_parent)
        filesystem_async._results_queue = _manager.Queue()
