"""Learning from a teacher's scores beside the preference loss: RankNet on its margins, listwise KL, margin-MSE; one
function a term.

Shapes: N documents of one list, M of them with a teacher score, P unordered pairs of those. Every term takes *scaled*
scores and a teacher's logits (divided by a temperature where its scale is another) and returns a scalar. A document
that the teacher did not grade holds NaN and takes no part. A list with fewer than two graded documents teaches nothing:
its terms are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrank.method.loss_settings import LossSettings


@dataclass(frozen=True)
class TeacherTerms:
    """``total`` is weighted and carries the gradient; ``accuracy`` is a detached number for the log."""

    total: torch.Tensor
    # share of pairs that the teacher orders in which the scores order alike; a tie is half right
    accuracy: torch.Tensor


def graded(scores_N: torch.Tensor, teacher_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and teacher logits [M] of the documents that the teacher graded, in the precision of the scores."""
    is_graded_N = ~torch.isnan(teacher_N)
    return scores_N[is_graded_N], teacher_N[is_graded_N].to(scores_N)


def pair_differences(values_M: torch.Tensor) -> torch.Tensor:
    """v_i - v_j over the unordered pairs i < j: [P]."""
    # every unordered pair once: both directions carry the same loss and would only double the work
    first, second = torch.triu_indices(len(values_M), len(values_M), offset=1, device=values_M.device)
    return values_M[first] - values_M[second]


def teacher_ranknet_loss(scores_M: torch.Tensor, teacher_M: torch.Tensor) -> torch.Tensor:
    """Mean over pairs of the cross entropy of sigma(s_i - s_j) with the soft label sigma(t_i - t_j)."""
    labels_P = torch.sigmoid(pair_differences(teacher_M))
    return F.binary_cross_entropy_with_logits(pair_differences(scores_M), labels_P)


def listwise_kl_loss(scores_M: torch.Tensor, teacher_M: torch.Tensor) -> torch.Tensor:
    """KL(softmax(t) || softmax(s)) over the list, in nats."""
    return F.kl_div(F.log_softmax(scores_M, dim=-1), F.log_softmax(teacher_M, dim=-1), reduction="sum", log_target=True)


def margin_mse_loss(scores_M: torch.Tensor, teacher_M: torch.Tensor) -> torch.Tensor:
    """Mean over pairs of ((s_i - s_j) - (t_i - t_j))^2."""
    return (pair_differences(scores_M) - pair_differences(teacher_M)).square().mean()


def pair_agreement(scores_M: torch.Tensor, teacher_M: torch.Tensor) -> torch.Tensor:
    """Share of the pairs that the teacher orders in which the scores order alike; 0.5 where it orders none."""
    signs_P, truth_P = pair_differences(scores_M).sign(), pair_differences(teacher_M).sign()
    right_P = ((signs_P * truth_P + 1) / 2)[truth_P != 0]
    return right_P.mean() if len(right_P) else scores_M.new_tensor(0.5)


def teacher_loss(scaled_N: torch.Tensor, teacher_N: torch.Tensor | None, settings: LossSettings) -> TeacherTerms:
    """The weighted sum of the terms of one list; terms of weight zero are not computed."""
    # a zero that depends on the scores: backward must reach every parameter on every rank, or the gradient reduction
    # hangs
    zero = scaled_N.sum() * 0.0
    if teacher_N is None:
        return TeacherTerms(zero, zero.detach())
    # NaN marks "not graded"; NaN times a weight of zero would still be NaN, so these documents are taken out and not
    # weighted
    scores_M, teacher_M = graded(scaled_N, teacher_N / settings.teacher_temperature)
    if len(scores_M) < 2:
        return TeacherTerms(zero, scaled_N.new_tensor(0.5))
    total = zero
    for weight, term in (
        (settings.teacher_ranknet_weight, teacher_ranknet_loss),
        (settings.teacher_listwise_weight, listwise_kl_loss),
        (settings.teacher_margin_weight, margin_mse_loss),
    ):
        if weight > 0:
            total = total + weight * term(scores_M, teacher_M)
    with torch.no_grad():
        return TeacherTerms(total, pair_agreement(scores_M, teacher_M))
