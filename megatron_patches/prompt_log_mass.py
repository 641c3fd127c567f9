"""A log-mass readout in the sequential or the parallel layout on a tensor-parallel rank: what was read, and this rank's
part of scores.

Shapes: B batch, N documents, K this rank's readout heads, R query rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrank.method.attention import BranchLayout
from headrank.method.log_mass import head_values, is_empty_document_BN
from headrank.method.readout import weighted_sum
from megatron_patches.late import RankReadout


@dataclass
class CapturedRatios:
    """What a forward read on this rank: layer -> log ratios [B, N, K, R] of its heads here, in ascending order; K may
    be 0.

    ``weight_delta`` [layers, heads on this rank] is what training has added to the readout's weights, None where they
    are fixed.
    """

    layers: dict[int, torch.Tensor] = field(default_factory=dict)
    weight_delta: torch.Tensor | None = None


def rank_scores(readout: RankReadout, captured: CapturedRatios, layout: BranchLayout) -> torch.Tensor:
    """This rank's part of scores_BN; their sum over ranks is the score.

    A rank without heads gets zeros that still hang in the graph: in backward other ranks wait for it in the layers'
    collectives.
    """
    ratios_BNKR = torch.cat(list(captured.layers.values()), dim=2)
    values_BNK = head_values(ratios_BNKR, layout, readout.offsets_K, readout.floor)
    return weighted_sum(values_BNK, readout.weights(captured.weight_delta))


def with_empty_last(scores_BN: torch.Tensor, layout: BranchLayout) -> torch.Tensor:
    """An empty document below the others of its list, without a gradient, as reranking puts it; its log mass would
    be -inf.
    """
    is_empty_BN = is_empty_document_BN(layout)
    lowest_B1 = scores_BN.detach().masked_fill(is_empty_BN, torch.inf).amin(dim=1, keepdim=True)
    last_B1 = torch.where(lowest_B1.isfinite(), lowest_B1, torch.zeros_like(lowest_B1)) - 1.0
    return torch.where(is_empty_BN, last_B1, scores_BN)
