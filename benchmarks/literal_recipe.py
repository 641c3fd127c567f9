"""The training step as the paper's text reads literally: what ours is compared with, and must have the same gradient
as.

One pair at a time: a full-depth pass over the prompt, a second pass for the calibration query, the same two passes of a
frozen second model in memory, the loss of that pair, its backward. Shapes: B = 1, S sequence, N documents.
"""

from __future__ import annotations

import dataclasses

import torch

from data_tools.training_set import Sample
from headrank.method.attention import BranchLayout, batch_contexts
from headrank.method.heads import HeadSet
from headrank.method.loss_settings import LossSettings
from headrank.method.losses import headrank_loss
from headrank.method.scores import calibrated_scores
from headrank.method.spans import EncodedContext
from megatron_patches.model import HeadRankModel


def two_prompts(encoded: EncodedContext) -> tuple[EncodedContext, EncodedContext]:
    """The branched context as two ordinary prompts: documents + query, documents + calibration query."""
    start, middle = encoded.prefix_length, encoded.prefix_length + encoded.query_length
    first = dataclasses.replace(
        encoded, input_ids=encoded.input_ids[:middle], calibration_length=0, calibration_rows=(0, 0)
    )
    shift = encoded.query_length
    second = dataclasses.replace(
        first,
        input_ids=torch.cat(
            [torch.from_numpy(encoded.input_ids[:start]), torch.from_numpy(encoded.input_ids[middle:])]
        ).numpy(),
        query_length=encoded.calibration_length,
        query_rows=(encoded.calibration_rows[0] - shift, encoded.calibration_rows[1] - shift),
    )
    return first, second


def literal_scores(
    model: HeadRankModel, encoded: EncodedContext, heads: HeadSet, is_full_depth: bool = True
) -> torch.Tensor:
    """scores_N from two separate passes, through every layer of the model."""
    wanted = heads.by_layer()
    if is_full_depth:
        wanted.setdefault(model.shape.layers - 1, [])
    tokens, layouts = [], []
    for prompt in two_prompts(encoded):
        input_ids, layout = batch_contexts([prompt])
        captured = model(input_ids, layout, wanted)
        tokens.append(sum(rows.query_rows.sum(dim=1) for rows in captured.rows.values()))
        layouts.append(layout)
    owner, length = _owners(layouts[0], encoded.prefix_length)
    scores_BN = calibrated_scores(tokens[0][:, :length], tokens[1][:, :length], owner, layouts[0].num_documents)
    return scores_BN[0]


def _owners(layout: BranchLayout, prefix_length: int) -> tuple[torch.Tensor, int]:
    return layout.document_of_token_BS[:, :prefix_length], prefix_length


def literal_backward(
    policy: HeadRankModel, reference: HeadRankModel, sample: Sample, heads: HeadSet, settings: LossSettings
) -> float:
    """Accumulate the gradient of the mean per-pair objective, pair by pair; returns that mean."""
    ranks = torch.from_numpy(sample.retrieval_ranks)
    total = 0.0
    for pair in torch.from_numpy(sample.pairs):
        with torch.no_grad():
            anchor_N = literal_scores(reference, sample.encoded, heads)
        scores_N = literal_scores(policy, sample.encoded, heads)
        loss = headrank_loss(scores_N, anchor_N, ranks, pair[None], settings).total / len(sample.pairs)
        loss.backward()
        total += float(loss.detach())
    return total
