"""The only module with collectives of ours: scores and head statistics over tensor-parallel shards, and the loop's few numbers.

Shapes: B batch, L captured layers, H heads in total, P heads on this rank, K core heads on this rank, S sequence, N documents.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from headrank.method.attention import BranchLayout
from headrank.method.scores import calibrated_scores, entropy, kept_tokens, sum_over_documents
from megatron_patches.model import CapturedRows


class HeadStatistics(NamedTuple):
    """Every head's numbers on every rank, heads in Hugging Face's order. Carries no gradient."""

    masses_BLHN: torch.Tensor  # Eq. 1, uncalibrated
    calibrated_BLHN: torch.Tensor | None  # the same after per-head calibration; None without the calibration branch
    entropies_BLH: torch.Tensor  # of the averaged query rows, in nats, over the whole sequence


def core_head_scores(
    captured: CapturedRows, layout: BranchLayout, *, is_calibrated: bool | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Document scores [B, N]: core heads summed over layers and ranks, calibrated where the layout has the branch.

    Sharded before: each rank holds the rows of its own core heads. Replicated after: the scores. Two all-reduces: the token
    differences [B, S] without gradient, because the calibration keeps or drops a token by the sum over *all* core heads;
    then the per-document sums [B, N] with gradient - sum forward, identity backward, since every rank computes the same loss
    from the same scores. Without calibration only the second happens.
    """
    group = group or parallel_state.get_tensor_model_parallel_group()
    is_calibrated = layout.has_calibration if is_calibrated is None else is_calibrated
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    query_BS = reduce(torch.add, (rows.query_rows.sum(dim=1) for rows in captured.rows.values()))
    if not is_calibrated:
        local_BN = sum_over_documents(query_BS, owner_BS, num_documents)
    else:
        calibration = (rows.calibration_rows for rows in captured.rows.values())
        calibration_BS = reduce(torch.add, (rows.sum(dim=1) for rows in calibration if rows is not None))
        total_BS = (query_BS - calibration_BS).detach().clone()
        if group.size() > 1:
            dist.all_reduce(total_BS, group=group)
        keep_BS = kept_tokens(total_BS, owner_BS, num_documents)
        local_BN = calibrated_scores(query_BS, calibration_BS, owner_BS, num_documents, keep=keep_BS)
    # contiguous and fresh: Megatron reduces in place, and loses the result of a tensor that is not contiguous
    return tensor_parallel.reduce_from_tensor_model_parallel_region(local_BN.contiguous().clone(), group=group)


@torch.no_grad()
def all_head_statistics(captured: CapturedRows, layout: BranchLayout, *, group: dist.ProcessGroup | None = None) -> HeadStatistics:
    """Masses, calibrated masses and entropies of all heads of the captured layers.

    Sharded before: each rank holds all of its heads' rows. Replicated after: all heads in Hugging Face's order, by one
    all-gather of everything along the head axis.
    """
    group = group or parallel_state.get_tensor_model_parallel_group()
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    columns = []
    for rows in captured.rows.values():
        parts = [sum_over_documents(rows.query_rows, owner_BS, num_documents), entropy(rows.query_rows)[..., None]]
        if rows.calibration_rows is not None:
            parts.append(calibrated_scores(rows.query_rows, rows.calibration_rows, owner_BS, num_documents))
        columns.append(torch.cat(parts, dim=-1))
    local_BLPC = torch.stack(columns, dim=1).contiguous()
    gathered = [torch.empty_like(local_BLPC) for _ in range(group.size())]
    dist.all_gather(gathered, local_BLPC, group=group)
    everything_BLHC = torch.cat(gathered, dim=2)
    calibrated_BLHN = everything_BLHC[..., num_documents + 1 :] if layout.has_calibration else None
    return HeadStatistics(everything_BLHC[..., :num_documents], calibrated_BLHN, everything_BLHC[..., num_documents])


def sum_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """The sum of every data-parallel rank's numbers, in place. Different before, the same on all of them after; no gradient."""
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def largest_on_any_rank(values: torch.Tensor) -> torch.Tensor:
    """Element by element the largest of all ranks, in place: what one rank noticed, all know. Different before, the same after."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def gather_from_all(value: Any) -> list[Any]:
    """Every rank's plain Python value, in rank order, on every rank; for small things that happen rarely. Alone without a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
