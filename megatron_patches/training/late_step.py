"""Scores and loss of a micro-batch in the late layout: each list against its own passages and, if wanted, those of all
ranks.

Shapes: U queries, N passages of this rank's lists together, C those of all data-parallel ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from data_tools.late_training_set import LateSample
from headrank.method.heads import HeadSet
from headrank.method.in_batch import in_batch_loss
from headrank.method.loss_settings import LossSettings
from headrank.method.losses import LossTerms, headrank_loss, scale_scores
from megatron_patches.late import RankReadout
from megatron_patches.parallel_scores import sum_over_tensor_parallel
from megatron_patches.training.batches import length_multiple
from megatron_patches.training.late_batches import LateBatch, make_late_batch


def score_late_batch(model: torch.nn.Module, batch: LateBatch, heads: HeadSet, *, is_in_batch: bool) -> torch.Tensor:
    """scores_UC of this rank's queries and the passages they meet (``batch.met``), the same on all tensor-parallel
    ranks.

    Without ``is_in_batch`` scores_UN of this rank's passages, of which only the blocks of own lists are computed, and
    nothing is gathered.
    """
    captured, met = model(batch.input_ids_1S, batch.layout, heads.by_layer()), batch.met
    readout = rank_readout(model, heads, batch.input_ids_1S.device)
    if not is_in_batch:
        return sum_over_tensor_parallel(readout.scores(captured, batch.layout, batch.lists))
    num_queries = met.num_ranks * batch.layout.num_queries
    return met.all_passages(
        sum_over_tensor_parallel(readout.scores(captured, batch.layout, None, met.all_queries, num_queries))
    )


def rank_readout(model: torch.nn.Module, heads: HeadSet, where: torch.device) -> RankReadout:
    """The part of the heads' readout that lies on this rank of ``model``."""
    bare = unwrap_model(model)
    return RankReadout.of(heads, bare.heads_on_rank, bare.shape.heads // bare.shape.groups, where)


def late_losses(
    scores_UC: torch.Tensor, batch: LateBatch, settings: LossSettings
) -> list[tuple[LossTerms, torch.Tensor]]:
    """The terms of each list and its weighted in-batch term, from what ``score_late_batch`` gave for these settings."""
    found, before = [], batch.met.first if settings.in_batch_weight > 0 else 0
    for query, own_places in enumerate(batch.lists):
        first, stop = (before + place for place in own_places)
        # the list's own passages: preferences and labels say nothing about those of other queries
        own = scores_UC[query, first:stop]
        terms = headrank_loss(
            own, batch.references[query], batch.ranks[query], batch.pairs[query], settings, batch.teachers[query]
        )
        contrast = own.new_zeros(())
        if settings.in_batch_weight > 0:
            scaled = scale_scores(scores_UC[query], settings.scaling, settings.scale)
            term = in_batch_loss(scaled[first:stop], batch.is_best[query], scaled, batch.met.is_negative[query])
            contrast = settings.in_batch_weight * term
        found.append((terms, contrast))
    return found


@torch.no_grad()
def score_late_sample(model: torch.nn.Module, sample: LateSample, heads: HeadSet, device: torch.device) -> np.ndarray:
    """The scores float32 [N] of a whole list under the given weights; an empty passage ranks last. Never gathers
    over data ranks.
    """
    is_empty = np.array([not len(tokens) for tokens in sample.passages])
    scores = np.zeros(len(is_empty), np.float32)
    if not is_empty.all():
        filled, multiple = sample.restricted_to(np.flatnonzero(~is_empty)), length_multiple(unwrap_model(model).config)
        batch = make_late_batch((filled,), None, device, multiple)
        scores[~is_empty] = score_late_batch(model, batch, heads, is_in_batch=False)[0].float().cpu().numpy()
        # below all others, as reranking puts them; a model sees no token of them
        scores[is_empty] = scores[~is_empty].min() - 1.0
    return scores
