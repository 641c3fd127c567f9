"""Held-out quality during training: NDCG@10 and preference accuracy on contexts no pair of which is trained on.

NDCG@10 has linear gains as trec_eval; its ideal ranking is that of the candidate list (the context is all there is
here), so it compares checkpoints with each other; numbers for a table come from 'headrank evaluate'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule

from data_tools.late_training_set import LateSample, LateTrainingSet
from data_tools.training_set import Sample, TrainingSet
from headrank.method.distillation import graded, pair_agreement
from headrank.method.heads import HeadSet
from headrank.method.list_places import ndcg
from megatron_patches.training.batches import length_multiple, make_batch
from megatron_patches.training.late_step import score_late_sample
from megatron_patches.training.train_step import score_batch


@torch.no_grad()
def score_sample(
    model: MegatronModule, sample: Sample | LateSample, heads: HeadSet, device: torch.device
) -> np.ndarray:
    """The scores float32 [N] of one context under the given weights, in prompt order."""
    if isinstance(sample, LateSample):
        return score_late_sample(model, sample, heads, device)
    batch = make_batch((sample,), None, device, length_multiple(model.config))
    return score_batch(model, batch, heads)[0].float().cpu().numpy()


def list_ndcg(scores: np.ndarray, grades: np.ndarray) -> float:
    """NDCG@10 of one list; scores that are not finite order nothing: NaN."""
    return float(ndcg(scores, grades)) if np.isfinite(scores).all() else math.nan


def preference_accuracy(scores: np.ndarray, pairs: np.ndarray) -> float:
    """Share of pairs whose chosen document scores higher; a tie is half right; NaN when scores are not finite."""
    if not np.isfinite(scores).all():
        return math.nan
    difference = scores[pairs[:, 0]] - scores[pairs[:, 1]]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def teacher_accuracy(scores: np.ndarray, teacher: np.ndarray) -> float:
    """Share of the pairs that the teacher orders which the scores order alike; a tie is half right; NaN when scores
    are not finite.
    """
    if not np.isfinite(scores).all():
        return math.nan
    return float(pair_agreement(*graded(torch.from_numpy(scores), torch.from_numpy(teacher))))


def held_out_samples(held_out: TrainingSet | LateTrainingSet, limit: int | None) -> list[Sample | LateSample]:
    """Every held-out context with all its pairs, in one order: the first shuffle where there are any, else the
    retriever's.
    """
    permutation = next((number for number in held_out.permutation_ids if number), 0)
    count = held_out.num_contexts if limit is None else min(limit, held_out.num_contexts)
    return [held_out.whole_context(context, permutation) for context in range(count)]


def evaluate(
    samples: Sequence[Sample | LateSample],
    score: Callable[[Any], np.ndarray],
    *,
    rank: int = 0,
    world_size: int = 1,
    reduce_sum: Callable[[np.ndarray], np.ndarray] = lambda sums: sums,
) -> dict[str, float]:
    """Means over the contexts, split over data-parallel ranks; ``reduce_sum`` adds up the ranks' sums.

    Accuracies are means over the contexts that have pairs, and over those that a teacher has graded; they are left out
    where there is none.
    """
    sums = np.zeros((3, 2))  # sum and number of NDCG@10, preference accuracy, teacher accuracy
    for sample in samples[rank::world_size]:
        scores = score(sample)
        sums[0] += list_ndcg(scores, sample.grades), 1.0
        if len(sample.pairs):
            sums[1] += preference_accuracy(scores, sample.pairs), 1.0
        if sample.teacher is not None and (~np.isnan(sample.teacher)).sum() > 1:
            sums[2] += teacher_accuracy(scores, sample.teacher), 1.0
    names = ("ndcg@10", "preference_accuracy", "teacher_accuracy")
    sums = reduce_sum(sums)
    return {name: float(total / count) for name, (total, count) in zip(names, sums, strict=True) if count} | {
        "contexts": int(sums[0, 1])
    }
