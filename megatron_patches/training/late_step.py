"""Scores and loss of a micro-batch in the late layout: each list against its own passages and, if wanted, all of the micro-batch.

Shapes: U queries, N passages of all lists together.
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
    """scores_UN, the same on all tensor-parallel ranks; without ``is_in_batch`` only the blocks of own passages are computed."""
    captured = model(batch.input_ids_1S, batch.layout, heads.by_layer())
    bare = unwrap_model(model)
    readout = RankReadout.of(heads, bare.heads_on_rank, bare.shape.heads // bare.shape.groups, batch.input_ids_1S.device)
    return sum_over_tensor_parallel(readout.scores(captured, batch.layout, None if is_in_batch else batch.lists))


def late_losses(scores_UN: torch.Tensor, batch: LateBatch, settings: LossSettings) -> list[tuple[LossTerms, torch.Tensor]]:
    """The terms of each list and its weighted in-batch term."""
    found = []
    for query, (first, stop) in enumerate(batch.lists):
        # the list's own passages: preferences and labels say nothing about those of other queries
        own = scores_UN[query, first:stop]
        terms = headrank_loss(own, batch.references[query], batch.ranks[query], batch.pairs[query], settings, batch.teachers[query])
        contrast = own.new_zeros(())
        if settings.in_batch_weight > 0:
            scaled = scale_scores(scores_UN[query], settings.scaling, settings.scale)
            term = in_batch_loss(scaled[first:stop], batch.is_best[query], scaled, batch.is_negative[query])
            contrast = settings.in_batch_weight * term
        found.append((terms, contrast))
    return found


@torch.no_grad()
def score_late_sample(model: torch.nn.Module, sample: LateSample, heads: HeadSet, device: torch.device) -> np.ndarray:
    """The scores float32 [N] of a whole list under the given weights; an empty passage ranks last. Never gathers over data ranks."""
    is_empty = np.array([not len(tokens) for tokens in sample.passages])
    scores = np.zeros(len(is_empty), np.float32)
    if not is_empty.all():
        filled, multiple = sample.restricted_to(np.flatnonzero(~is_empty)), length_multiple(unwrap_model(model).config)
        batch = make_late_batch((filled,), None, device, multiple)
        scores[~is_empty] = score_late_batch(model, batch, heads, is_in_batch=False)[0].float().cpu().numpy()
        # below all others, as reranking puts them; a model sees no token of them
        scores[is_empty] = scores[~is_empty].min() - 1.0
    return scores
