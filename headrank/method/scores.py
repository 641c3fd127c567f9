"""From averaged attention rows to document scores: Eq. 1 masses, calibration, entropy. Pure tensor functions.

Shapes: B batch, K heads, S sequence, N documents. ``document_of_token_BS`` holds N where a token is in no document, so
padding and prompt text fall into a segment that is dropped. The functions accept [B, S] (heads summed) or [B, K, S].
"""

from __future__ import annotations

import torch

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
    query_tokens: torch.Tensor,
    calibration_tokens: torch.Tensor,
    document_of_token_BS: torch.Tensor,
    num_documents: int,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores [B, (K,) N]: c_t = s_t - s_t(N/A), outlier tokens dropped, the rest summed per document.

    Both branches carry gradient. ``keep`` replaces the mask when it was computed elsewhere (over all tensor-parallel ranks).
    """
    difference = query_tokens - calibration_tokens
    if keep is None:
        keep = kept_tokens(difference, document_of_token_BS, num_documents)
    return sum_over_documents(difference * keep, document_of_token_BS, num_documents)


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Shannon entropy (nats) over the last axis, 0 log 0 = 0: H^(l,h) of the paper."""
    return torch.special.entr(probabilities).sum(-1)
