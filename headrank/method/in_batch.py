"""The contrastive term of the late layout: a query's best passages against the passages of the other queries of a step.

In the late layout a score depends on its query and passage alone, so every query of a step can be scored against every
passage of it at the price of a product of keys. Shapes: N passages of the query's own list, C passages of the whole
step.

A passage of another list is a negative unless it stands in the query's own list too (drawn or not: it may be relevant,
or is already taught by the list's own terms) or the other list belongs to the same query.
"""

from __future__ import annotations

import torch


def best_passages(teacher_N: torch.Tensor | None, grades_N: torch.Tensor) -> torch.Tensor:
    """The mask of the passages to be found: the teacher's first choice, else those of the highest grade, if it is
    above 0.
    """
    if teacher_N is not None:
        # a list that the teacher did not grade is all -inf: its maximum equals every entry, and the second condition
        # empties the mask
        known_N = torch.nan_to_num(teacher_N, nan=-torch.inf)
        return (known_N == known_N.max()) & known_N.isfinite()
    return (grades_N == grades_N.max()) & (grades_N > 0)


def negatives(
    digests_C: torch.Tensor, query_of_passage_C: torch.Tensor, query: int, known: torch.Tensor
) -> torch.Tensor:
    """The mask [C] of the negatives of a list of ``query`` (its digest): other queries' passages not among ``known``
    (digests).
    """
    # by digest and not by document id: the same passage under another id would be pushed away from the query it answers
    return (query_of_passage_C != query) & ~torch.isin(digests_C, known)


def in_batch_loss(
    scores_N: torch.Tensor, is_best_N: torch.Tensor, scores_C: torch.Tensor, is_negative_C: torch.Tensor
) -> torch.Tensor:
    """Mean over the best passages p of -log( e^s_p / (e^s_p + sum over negatives e^s) ); zero without a best one or
    a negative.
    """
    if not bool(is_best_N.any()) or not bool(is_negative_C.any()):
        return scores_N.sum() * 0.0
    # one sum for all best passages: they must not be each other's negatives
    others = scores_C[is_negative_C].logsumexp(-1)
    best = scores_N[is_best_N]
    return (torch.logaddexp(best, others) - best).mean()
