"""The results queue of Megatron's checkpoint writer, without the process that Megatron would start for it.

Megatron-Core keeps the queue in a module variable and, on first use, starts a manager process to serve it, so that a writer
in another process could fill it. Our saves are synchronous: the same process fills and empties the queue. The manager costs
every rank an interpreter that imports everything again (seconds, some 190 MB), and a trainer that is killed leaves it behind
for ever. A plain queue does the same work.
"""

from __future__ import annotations

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def prepare_writer_queue() -> None:
    """Give Megatron's writer an ordinary queue before it makes one of its own."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
