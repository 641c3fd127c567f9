"""Which passages every query of a micro-batch meets in the in-batch term: its own rank's, or those of all data-parallel
ranks.

A passage needs no forward on another rank: the query vectors travel to the keys, and the scores back. Shapes: U queries
of this rank, N its passages, C the passages of all ranks together (rank by rank), R query rows, K this tensor-parallel
rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from data_tools.late_training_set import LateSample
from headrank.method.in_batch import negatives
from headrank.method.late_layout import QueryVectors
from megatron_patches.parallel_scores import gather_over_data_parallel


@dataclass(frozen=True)
class MetPassages:
    """The passages of each rank, which rank this one is, and for each of its lists the mask [C] of its negatives."""

    counts: tuple[int, ...]
    rank: int
    num_rows: int  # of the longest query of any rank
    is_negative: tuple[torch.Tensor, ...]

    @property
    def first(self) -> int:
        """Where this rank's passages begin among all."""
        return sum(self.counts[: self.rank])

    @property
    def num_ranks(self) -> int:
        """1 while nothing was shared."""
        return len(self.counts)

    def all_queries(self, queries: QueryVectors) -> QueryVectors:
        """The queries of all ranks, rank by rank, rows padded to the longest. Collective, differentiable."""
        if self.num_ranks == 1:
            return queries
        more = self.num_rows - queries.weights_UR.shape[1]
        return QueryVectors(
            gather_over_data_parallel(F.pad(queries.vectors_UKRD, (0, 0, 0, more))).flatten(0, 1),
            gather_over_data_parallel(F.pad(queries.opening_UKR, (0, more))).flatten(0, 1),
            gather_over_data_parallel(F.pad(queries.weights_UR, (0, more))).flatten(0, 1),
        )

    def all_passages(self, scores_VN: torch.Tensor) -> torch.Tensor:
        """scores_UC of this rank's queries from the scores of all ranks' queries V and this rank's passages.
        Collective, differentiable.
        """
        if self.num_ranks == 1:
            return scores_VN
        padded_VM = F.pad(scores_VN, (0, max(self.counts) - scores_VN.shape[1]))
        num_queries = len(self.is_negative)
        mine = gather_over_data_parallel(padded_VM)[:, self.rank * num_queries : (self.rank + 1) * num_queries]
        return torch.cat([block_UM[:, :count] for block_UM, count in zip(mine, self.counts, strict=True)], dim=1)


def passages_met(samples: Sequence[LateSample], device: torch.device, *, is_shared: bool = False) -> MetPassages:
    """The passages of this rank's samples or, with ``is_shared`` (collective), of all data-parallel ranks'
    micro-batches.
    """
    # digests seen as int64: torch has no comparison of uint64, and equal bits stay equal
    digests = np.concatenate([sample.digests for sample in samples])
    queries = np.concatenate([np.full(len(sample.digests), sample.query_digest, np.uint64) for sample in samples])
    mine_N2 = torch.from_numpy(np.stack([digests, queries], axis=1).view(np.int64))
    num_rows = max(sample.query.num_rows for sample in samples)
    counts, rank, parts = [len(mine_N2)], 0, [mine_N2]
    if is_shared and parallel_state.get_data_parallel_world_size() > 1:
        rank = parallel_state.get_data_parallel_rank()
        sizes = gather_over_data_parallel(torch.tensor([len(mine_N2), num_rows, len(samples)], device=device)).tolist()
        assert len({size[2] for size in sizes}) == 1, "ranks have micro-batches of one size"
        counts, num_rows = [size[0] for size in sizes], max(size[1] for size in sizes)
        padded = F.pad(mine_N2, (0, 0, 0, max(counts) - len(mine_N2))).to(device)
        gathered = gather_over_data_parallel(padded).cpu()
        parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    all_C2 = torch.cat(parts)
    masks = [
        negatives(
            all_C2[:, 0],
            all_C2[:, 1],
            _as_int64(sample.query_digest),
            torch.from_numpy(sample.list_digests.view(np.int64)),
        )
        for sample in samples
    ]
    return MetPassages(tuple(counts), rank, num_rows, tuple(mask.to(device) for mask in masks))


def _as_int64(digest: int) -> int:
    return int(np.array([digest], np.uint64).view(np.int64)[0])
