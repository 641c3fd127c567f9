"""The two recipes a plan compares, and batches of a job's lengths for them.

"ours" is what pretrain_headrank.py runs: layers up to l_max, both branches in one pass, P pairs per context, the
reference from its cache. "literal" is the paper's text: every layer, one pair a forward, calibration as a second pass,
the frozen reference as a second model in memory. Shapes: B batch, S sequence, N documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from data_tools.training_set import Sample
from headrank.method.attention import BranchLayout, batch_contexts
from headrank.method.heads import HeadSet
from headrank.method.spans import EncodedContext
from megatron_patches import device
from megatron_patches.attention import LayerRows
from megatron_patches.model import CapturedRows, HeadRankModel, build_model, build_transformer_config
from megatron_patches.parallel_scores import core_head_scores
from megatron_patches.planner.job import (
    CALIBRATION_ROWS,
    CALIBRATION_TOKENS,
    LABEL_TOKENS,
    OPENING_TOKENS,
    QUERY_ROWS,
    QUERY_TOKENS,
    Job,
)
from megatron_patches.shape import ModelShape
from megatron_patches.training.assembly import layer_settings
from megatron_patches.training.batches import Batch
from megatron_patches.training.config import TrainingConfig
from megatron_patches.training.train_step import batch_loss, guarded_update

RECIPES = ("ours", "literal")


def build_full_model(config: TrainingConfig, shape: ModelShape) -> HeadRankModel:
    """Every layer, every weight trainable: the paper trains and optimises the whole model."""
    transformer_config = build_transformer_config(
        shape,
        tensor_model_parallel_size=config.tensor_parallel,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        **layer_settings(config),
    )
    model = build_model(shape, transformer_config=transformer_config)
    return model.bfloat16() if config.bf16 else model  # norms too, as build_policy does


def _encoded(job: Job, query_tokens: int, calibration_tokens: int, rows: int) -> EncodedContext:
    """A context of the job's lengths; the ids do not matter."""
    prefix, start = job.prefix_tokens, OPENING_TOKENS + LABEL_TOKENS
    width = job.document_tokens + LABEL_TOKENS
    first_row = prefix + query_tokens - rows
    end = prefix + query_tokens + calibration_tokens
    return EncodedContext(
        input_ids=np.zeros(end, np.int32),
        prefix_length=prefix,
        query_length=query_tokens,
        calibration_length=calibration_tokens,
        query_rows=(first_row, first_row + rows),
        calibration_rows=(end - min(calibration_tokens, CALIBRATION_ROWS), end),
        document_spans=tuple(
            (start + width * index, start + width * index + job.document_tokens) for index in range(job.documents)
        ),
        is_parallel=job.heads.prompt.is_parallel,
    )


def _batch(job: Job, encoded: EncodedContext, num_pairs: int) -> Batch:
    pairs = np.stack([np.arange(num_pairs) % job.documents, np.arange(1, num_pairs + 1) % job.documents], axis=1)
    ranks = np.arange(1, job.documents + 1)
    sample = Sample("context", "query", 0, 0, encoded, ranks, np.zeros(job.documents, np.int64), pairs)
    step = job.tensor_parallel if job.is_sequence_parallel else 1  # what training pads to besides is under a percent
    input_ids_BS, layout = batch_contexts(
        [encoded] * job.micro_batch_size,
        device=device.device(),
        pad_to=-(-encoded.length // step) * step,
        is_flexible=job.has_gpu_kernels and "flexible attention" not in job.lacks,
    )
    copies = range(job.micro_batch_size)
    return Batch(
        samples=(sample,) * job.micro_batch_size,
        input_ids_BS=input_ids_BS,
        layout=layout,
        ranks=tuple(torch.from_numpy(ranks) for _ in copies),
        pairs=tuple(torch.from_numpy(pairs) for _ in copies),
        references=tuple(torch.zeros(job.documents) for _ in copies),
        teachers=tuple(None for _ in copies),
    )


def one_pass_batch(job: Job) -> Batch:
    """The two-branch prompt with all its pairs."""
    return _batch(job, _encoded(job, QUERY_TOKENS, CALIBRATION_TOKENS, QUERY_ROWS), job.pairs_per_context)


def two_pass_batch(job: Job) -> tuple[Batch, Batch]:
    """The query's prompt and the content-free prompt, each whole, with a single pair."""
    return _batch(job, _encoded(job, QUERY_TOKENS, 0, QUERY_ROWS), 1), _batch(
        job, _encoded(job, CALIBRATION_TOKENS, 0, CALIBRATION_ROWS), 1
    )


def two_pass_scores(
    model: torch.nn.Module, query: Batch, calibration: Batch, heads: HeadSet, num_layers: int
) -> torch.Tensor:
    """Calibrated scores_BN from two full-depth passes over the two prompts, as the peers compute them."""
    heads_by_layer = {**heads.by_layer(), num_layers - 1: heads.by_layer().get(num_layers - 1, [])}
    of_query = model(query.input_ids_BS, query.layout, heads_by_layer)
    of_nothing = model(calibration.input_ids_BS, calibration.layout, heads_by_layer)
    width = int(min(query.input_ids_BS.shape[1], calibration.input_ids_BS.shape[1]))
    rows = {
        layer: LayerRows(read.heads, read.query_rows[..., :width], of_nothing.rows[layer].query_rows[..., :width])
        for layer, read in of_query.rows.items()
    }
    layout: BranchLayout = dataclasses.replace(
        query.layout, document_of_token_BS=query.layout.document_of_token_BS[:, :width]
    )
    return core_head_scores(CapturedRows(rows), layout, is_calibrated=True)


def literal_step(
    model: DistributedDataParallel,
    reference: HeadRankModel,
    optimizer: Any,
    batches: Iterator[tuple[Batch, Batch]],
    heads: HeadSet,
    config: TrainingConfig,
) -> None:
    """One step of the paper's text, through the same schedule and the same update as ours."""

    def forward(data: Iterator[tuple[Batch, Batch]], policy: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        query, calibration = next(data)
        num_layers = reference.config.num_layers
        with torch.no_grad():
            anchor_BN = two_pass_scores(reference, query, calibration, heads, num_layers)
        scores_BN = two_pass_scores(policy, query, calibration, heads, num_layers)
        anchored = dataclasses.replace(query, references=tuple(anchor_BN))
        return scores_BN, lambda scores_BN: (batch_loss(scores_BN, anchored, config.loss)[0], {})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=[model],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    guarded_update(optimizer, is_loss_finite=True)
