"""Megatron's checkpoint writers, made so that a killed trainer leaves no process behind.

Megatron-Core writes every file in a forked process and keeps their results in a queue of a module variable which, on
first use, starts a manager process to serve it. Our saves are synchronous: one process fills and empties that queue, so
a plain one does the same work without an interpreter that imports everything again (seconds, some 190 MB per rank). The
forked writers die with the trainer; on their own they would wait for ever for a queue that nobody fills.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import sys

from megatron.core.dist_checkpointing.strategies import filesystem_async

PR_SET_PDEATHSIG = 1  # Linux: the signal a process gets when its parent ends


def prepare_writers() -> None:
    """Give Megatron's writer an ordinary queue before it makes one of its own, and tie forked processes to this one."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    tie_forked_processes()


@functools.cache
def tie_forked_processes() -> None:
    """From now on, whatever this process and its children fork is killed when its parent ends. Does nothing but on
    Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    prctl, forker = ctypes.CDLL(None).prctl, [os.getpid()]

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != forker[0]:  # it ended before the line above
            os._exit(1)
        forker[0] = os.getpid()

    os.register_at_fork(after_in_child=tie)
