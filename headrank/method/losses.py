"""The training objective: L_align, L_prox, Omega and, for the ablation, RankNet; one function a term. A teacher's are
in distillation.py.

Shapes: N documents of one list, P preference pairs of that list. Every term takes *scaled* scores (``scale_scores``)
and returns a scalar; ``headrank_loss`` adds them up for one context. Pairs share the list, so pair terms are means over
the pairs and Omega is counted once per context: the same as the mean over pairs of the paper's per-pair objective.

alpha and beta are the paper's (0.05). The margin m, gamma, eta, the temperature of p and the scale of the scores are
not in the paper: they are ours, and docs/results.md has the search over all but the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrank.method.distillation import teacher_loss
from headrank.method.list_places import middle_places
from headrank.method.loss_settings import LossSettings

SMALLEST_SPREAD = 1e-12  # a list of equal scores has no spread to divide by; it stays as it is


@dataclass(frozen=True)
class LossTerms:
    """What one context contributes: ``total`` carries the gradient, the rest are detached numbers for the log."""

    total: torch.Tensor
    align: torch.Tensor
    proximal: torch.Tensor
    omega: torch.Tensor  # signed: gamma H(p) - eta Var(s_mid)
    entropy: torch.Tensor  # H(p) in nats
    middle_std: torch.Tensor  # standard deviation of the scaled middle-zone scores
    score_margin: torch.Tensor  # mean of s+ - s- over the pairs
    accuracy: torch.Tensor  # share of pairs with s+ > s-; a tie is half right; 0 without pairs
    teacher: torch.Tensor  # the weighted terms of the teacher
    teacher_accuracy: torch.Tensor  # share of the teacher's pairs that are ordered alike


def scale_scores(scores_N: torch.Tensor, scaling: str, scale: float) -> torch.Tensor:
    """Bring calibrated masses to the scale on which m, alpha, beta, gamma and eta are stated. Same rule for the
    reference.

    ``constant`` multiplies; ``standardise`` takes the list to mean 0 and deviation ``scale``; ``max-min`` to [0,
    scale]. The list's own statistics carry no gradient, so no pair is pulled through another document's score.
    """
    if scaling == "constant":
        return scores_N * scale
    # detached: through the maximum or the mean a pair's gradient would move documents that are in no pair
    fixed_N = scores_N.detach()
    if scaling == "standardise":
        offset, spread = fixed_N.mean(), fixed_N.std(correction=0)
    else:
        offset, spread = fixed_N.min(), fixed_N.max() - fixed_N.min()
    # where() and not an if: a comparison on the host would make a GPU wait in every context
    spread = torch.where(spread > SMALLEST_SPREAD, spread, torch.ones_like(spread))
    return (scores_N - offset) * (scale / spread)


def alignment_loss(differences_P: torch.Tensor, margin: float, linear_weight: float) -> torch.Tensor:
    """L_align: mean over pairs of -log sigmoid(Delta s) + [m - Delta s]_+ - alpha Delta s."""
    # logsigmoid and not log(sigmoid): a confident wrong pair underflows to log 0
    return (-F.logsigmoid(differences_P) + F.relu(margin - differences_P) - linear_weight * differences_P).mean()


def ranknet_loss(differences_P: torch.Tensor) -> torch.Tensor:
    """The ablation "w/ SFT": mean over pairs of -log sigmoid(Delta s)."""
    return -F.logsigmoid(differences_P).mean()


def proximal_loss(
    scores_N: torch.Tensor, reference_N: torch.Tensor, chosen_P: torch.Tensor, rejected_P: torch.Tensor, weight: float
) -> torch.Tensor:
    """L_prox: mean over pairs of beta/2 ||[s+ - s_ref+, s- - s_ref-]||^2; the reference carries no gradient."""
    squared_N = (scores_N - reference_N.detach()).square()
    return 0.5 * weight * (squared_N[chosen_P] + squared_N[rejected_P]).mean()


def score_entropy(scores_N: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """H(p) of p = softmax(s / T) over the list, in nats."""
    # p log p from log-probabilities: 0 log 0 comes out as 0 and not as NaN
    log_p_N = F.log_softmax(scores_N / temperature, dim=-1)
    return -(log_p_N.exp() * log_p_N).sum()


def middle_zone(retrieval_ranks_N: torch.Tensor) -> torch.Tensor:
    """The documents between the 25th and 75th percentile of the retriever's order, ascending.

    It follows retrieval ranks whatever the order in the prompt; gaps in the ranks (filtered documents) do not matter.
    Indices and not a mask: a GPU would have to wait until the mask is counted.
    """
    by_rank_N = torch.argsort(retrieval_ranks_N, stable=True)
    return by_rank_N[middle_places(len(retrieval_ranks_N))].sort().values


def middle_variance(scores_N: torch.Tensor, retrieval_ranks_N: torch.Tensor) -> torch.Tensor:
    """Var(s_mid), the population variance over the middle zone; zero when the zone holds fewer than two documents."""
    middle = scores_N[middle_zone(retrieval_ranks_N)]
    # the gradient of var() over one number is NaN; the product keeps the graph connected
    return middle.var(correction=0) if len(middle) > 1 else scores_N.sum() * 0.0


def regulariser(
    scores_N: torch.Tensor,
    retrieval_ranks_N: torch.Tensor,
    entropy_weight: float,
    variance_weight: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Omega(s) = gamma H(p) - eta Var(s_mid): sharpen the list, spread its middle."""
    entropy = score_entropy(scores_N, temperature)
    return entropy_weight * entropy - variance_weight * middle_variance(scores_N, retrieval_ranks_N)


def _mean_or_zero(values_P: torch.Tensor) -> torch.Tensor:
    return values_P.mean() if len(values_P) else values_P.sum()


def headrank_loss(
    scores_N: torch.Tensor,
    reference_N: torch.Tensor | None,
    retrieval_ranks_N: torch.Tensor,
    pairs_P2: torch.Tensor,
    settings: LossSettings,
    teacher_N: torch.Tensor | None = None,
) -> LossTerms:
    """L_total of one context from raw scores: (chosen, rejected) indices ``pairs_P2`` in the order of ``scores_N``.

    ``reference_N`` holds the frozen model's raw scores and ``teacher_N`` a teacher's (NaN where it gave none); they may
    be None when nothing looks at them.
    """
    if len(pairs_P2) == 0 and settings.needs_pairs:
        raise ValueError("a context without preference pairs has no loss")
    scaled_N = scale_scores(scores_N, settings.scaling, settings.scale)
    chosen_P, rejected_P = pairs_P2.unbind(dim=1)
    differences_P = scaled_N[chosen_P] - scaled_N[rejected_P]
    align = proximal = omega = scaled_N.new_zeros(())
    if settings.objective == "ranknet":
        align = ranknet_loss(differences_P)
    elif settings.objective == "headrank":
        align = alignment_loss(differences_P, settings.margin, settings.linear_weight)
        omega = regulariser(
            scaled_N, retrieval_ranks_N, settings.entropy_weight, settings.variance_weight, settings.temperature
        )
        if settings.needs_reference:
            if reference_N is None:
                raise ValueError("the proximal term needs reference scores")
            anchor_N, moved_N = scale_scores(reference_N.to(scaled_N), settings.scaling, settings.scale), scaled_N
            if settings.is_proximal_centred:
                # log masses carry a constant per list that means nothing; the penalty must not hold it in place
                anchor_N, moved_N = anchor_N - anchor_N.mean(), moved_N - moved_N.mean()
            proximal = proximal_loss(moved_N, anchor_N, chosen_P, rejected_P, settings.proximal_weight)
    teacher = teacher_loss(scaled_N, teacher_N, settings)
    total = align + proximal + omega + teacher.total
    # numbers of the log: kept in the graph they would hold the activations of every context of the window
    with torch.no_grad():
        return LossTerms(
            total=total,
            align=align.detach(),
            proximal=proximal.detach(),
            omega=omega.detach(),
            entropy=score_entropy(scaled_N, settings.temperature),
            middle_std=middle_variance(scaled_N, retrieval_ranks_N).sqrt(),
            score_margin=_mean_or_zero(differences_P),
            accuracy=_mean_or_zero((differences_P > 0).to(scaled_N) + 0.5 * (differences_P == 0).to(scaled_N)),
            teacher=teacher.total.detach(),
            teacher_accuracy=teacher.accuracy,
        )
