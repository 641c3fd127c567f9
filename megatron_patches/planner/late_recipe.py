"""A micro-batch of the late layout for a rehearsal: lists of the job's lengths, every passage and every query of its
own.
"""

from __future__ import annotations

import numpy as np

from data_tools.late_training_set import LateFrame, LateSample
from headrank.method.late_prompt import EncodedQuery
from megatron_patches import device
from megatron_patches.planner.job import LATE_QUERY_TOKENS, OPENING_TOKENS, QUERY_ROWS, Job
from megatron_patches.training.late_batches import LateBatch, make_late_batch


def late_batch(job: Job) -> LateBatch:
    """``micro_batch_size`` lists of ``documents`` passages; the numbers of tokens and labels do not matter."""
    samples = tuple(_sample(job, number) for number in range(job.micro_batch_size))
    return make_late_batch(samples, None, device.device(), job.tensor_parallel if job.is_sequence_parallel else 1)


def _sample(job: Job, number: int) -> LateSample:
    count = job.documents
    # no two alike: equal passages of different lists would be masked out of the in-batch term
    digests = np.arange(number * count, (number + 1) * count, dtype=np.uint64)
    places = np.arange(count)
    return LateSample(
        context_id=f"context-{number}",
        query_id=f"query-{number}",
        context_index=number,
        permutation=0,
        query=EncodedQuery(np.zeros(LATE_QUERY_TOKENS, np.int32), LATE_QUERY_TOKENS - QUERY_ROWS),
        query_digest=number,
        frame=LateFrame(np.zeros(OPENING_TOKENS, np.int32), job.heads.prompt.branch_position),
        passages=(np.zeros(job.document_tokens, np.int32),) * count,
        digests=digests,
        list_digests=digests,
        places=places,
        retrieval_ranks=places + 1,
        grades=np.full(count, -1),
        pairs=np.zeros((0, 2), np.int64),
        teacher=np.linspace(1.0, -1.0, count, dtype=np.float32),
    )
