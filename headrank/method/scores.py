"""From averaged attention rows to document scores: Eq. 1 masses, the core heads' sum, calibration, entropy. Pure tensor
functions.

Shapes: B batch, K heads, S sequence, N documents. ``document_of_token_BS`` holds N where a token is in no document, so
padding and prompt text fall into a segment that is dropped. The functions accept [B, S] (heads summed) or [B, K, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headrank.method.attention import BranchLayout

Reduction = Callable[[torch.Tensor], torch.Tensor]  # from one rank's part of a sum to the sum over all ranks

KEEP_WITHIN_STDS = 2.0  # calibration keeps tokens above mean - 2 std of their document, as ICR does


def _index(values: torch.Tensor, document_of_token_BS: torch.Tensor) -> torch.Tensor:
    return document_of_token_BS if values.dim() == 2 else document_of_token_BS[:, None, :].expand(values.shape)


def sum_over_documents(values: torch.Tensor, document_of_token_BS: torch.Tensor, num_documents: int) -> torch.Tensor:
    """Sum token values [B, (K,) S] over each document's tokens: [B, (K,) N]. With A_t this is alpha_d of Eq. 1."""
    sums = values.new_zeros(*values.shape[:-1], num_documents + 1)
    return sums.scatter_add(-1, _index(values, document_of_token_BS), values)[..., :num_documents]


@torch.no_grad()
def kept_tokens(difference: torch.Tensor, document_of_token_BS: torch.Tensor, num_documents: int) -> torch.Tensor:
    """The calibration's keep-mask: c_t > mean - 2 std (unbiased) within its document; a one-token document keeps it.

    Carries no gradient. Where all tokens of a document are equal nothing is an outlier, and all are kept.
    """
    index = _index(difference, document_of_token_BS)
    values = difference.detach()
    values = values if values.device.type == "mps" else values.double()  # Apple's GPUs have no float64
    zeros = values.new_zeros(*values.shape[:-1], num_documents + 1)
    counts = zeros.scatter_add(-1, index, torch.ones_like(values))
    means = zeros.scatter_add(-1, index, values) / counts.clamp_min(1)
    deviations = values - means.gather(-1, index)
    variances = zeros.scatter_add(-1, index, deviations.square()) / (counts - 1).clamp_min(1)
    floor = -KEEP_WITHIN_STDS * variances.sqrt().gather(-1, index)
    return (deviations > floor) | (variances.gather(-1, index) == 0)


def calibrated_scores(
    query_tokens: torch.Tensor, calibration_tokens: torch.Tensor, document_of_token_BS: torch.Tensor, num_documents: int
) -> torch.Tensor:
    """Scores [B, (K,) N]: c_t = s_t - s_t(N/A), outlier tokens dropped, the rest summed per document.

    Both branches carry gradient, the keep-mask none. With [B, K, S] every head drops its own outliers.
    """
    difference = query_tokens - calibration_tokens
    keep = kept_tokens(difference, document_of_token_BS, num_documents)
    return sum_over_documents(difference * keep, document_of_token_BS, num_documents)


def core_head_scores(
    query_rows: Sequence[torch.Tensor],
    calibration_rows: Sequence[torch.Tensor] | None,
    layout: BranchLayout,
    reduce: Reduction = lambda values: values,
) -> torch.Tensor:
    """The score of HeadRank, scores_BN: core heads summed per token, calibrated, pooled over each document.

    The rows are those of the core heads, one [B, K, S] per layer; ``calibration_rows`` None leaves the calibration out.
    Where the heads are sharded over ranks, ``reduce`` sums over them, with the gradient of an identity. It is called
    twice, because a token is kept or dropped by the sum over *all* core heads: on the token differences [B, S] (no
    gradient), then on the scores [B, N].
    """
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    values_BS = sum_over_heads(query_rows)
    if calibration_rows is not None:
        values_BS = values_BS - sum_over_heads(calibration_rows)
        values_BS = values_BS * kept_tokens(reduce(values_BS.detach()), owner_BS, num_documents)
    return reduce(sum_over_documents(values_BS, owner_BS, num_documents))


def sum_over_heads(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [B, K, S] of each layer added up to [B, S], layer by layer in the order given; a layer may have no heads."""
    return fold(torch.add, (rows_BKS.sum(dim=1) for rows_BKS in rows))


def scores_per_head(
    query_rows: Sequence[torch.Tensor], calibration_rows: Sequence[torch.Tensor] | None, layout: BranchLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``core_head_scores`` before the heads are summed: token values [B, K, S], the keep-mask [B, S], scores [B, K, N].

    The mask is that of the heads' sum, so that the scores of all heads add up to the score.
    """
    owner_BS, num_documents = layout.document_of_token_BS, layout.num_documents
    values_BKS = torch.cat(list(query_rows), dim=1)
    kept_BS = torch.ones_like(values_BKS[:, 0], dtype=torch.bool)
    if calibration_rows is not None:
        values_BKS = values_BKS - torch.cat(list(calibration_rows), dim=1)
        kept_BS = kept_tokens(values_BKS.sum(1), owner_BS, num_documents)
    return values_BKS, kept_BS, sum_over_documents(values_BKS * kept_BS[:, None], owner_BS, num_documents)


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Shannon entropy (nats) over the last axis, 0 log 0 = 0: H^(l,h) of the paper."""
    return torch.special.entr(probabilities).sum(-1)
