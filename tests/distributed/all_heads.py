"""Masses, calibrated masses and entropies of every head at any TP size, gathered over ranks: what the parity tests
compare.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from headrank.method.attention import BranchLayout
from headrank.method.scores import calibrated_scores, entropy, sum_over_documents


@torch.no_grad()
def all_head_statistics(captured: Any, layout: BranchLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """masses_BLHN, calibrated_BLHN and entropies_BLH in Hugging Face's head order; every rank has captured all of
    its heads.
    """
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    columns = []
    for rows in captured.rows.values():
        masses_BPN = sum_over_documents(rows.query_rows, owner_BS, num_documents)
        calibrated_BPN = calibrated_scores(rows.query_rows, rows.calibration_rows, owner_BS, num_documents)
        columns.append(torch.cat([masses_BPN, calibrated_BPN, entropy(rows.query_rows)[..., None]], dim=-1))
    local_BLPC = torch.stack(columns, dim=1).contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    gathered = [torch.empty_like(local_BLPC) for _ in range(group.size())]
    dist.all_gather(gathered, local_BLPC, group=group)
    everything_BLHC = torch.cat(gathered, dim=2)
    return everything_BLHC[..., :num_documents], everything_BLHC[..., num_documents:-1], everything_BLHC[..., -1]
