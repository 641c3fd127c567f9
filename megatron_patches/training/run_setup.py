"""Everything between the checked configuration and the loop: data, reference scores, model, optimizer, the
checkpoint to resume from.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from data_tools.late_training_set import LateTrainingSet
from data_tools.training_set import TrainingSet
from headrank.method.heads import HeadSet, head_name
from headrank.method.prompt import PromptTemplate
from headrank.model_config import load_config
from headrank.reranking.model_sources import resolve_model
from megatron_patches import device
from megatron_patches.checkpoints.files import checkpoint_directory
from megatron_patches.checkpoints.run_checkpoints import RunCheckpoints, load_start_weights, resolve_start
from megatron_patches.checkpoints.safetensors_files import local_directory
from megatron_patches.model import HeadRankModel
from megatron_patches.parallel_scores import gather_from_all
from megatron_patches.shape import ModelShape
from megatron_patches.training.assembly import (
    build_optimizer,
    build_policy,
    data_parallel_rank,
    is_first_tensor_rank,
    saving_report,
    wrap_model,
)
from megatron_patches.training.batches import Batch, length_multiple, training_batches
from megatron_patches.training.config import TrainingConfig
from megatron_patches.training.config_checks import require_place
from megatron_patches.training.data_setup import held_out_data, open_training_data
from megatron_patches.training.held_out import score_sample
from megatron_patches.training.late_batches import LateBatch
from megatron_patches.training.loop import Progress, Run
from megatron_patches.training.reference import ReferenceScores, needed_contexts, reference_key
from megatron_patches.training.training_log import MetricsWriter

logger = logging.getLogger(__name__)

REFERENCE_FILE = "reference_scores.jsonl"


def with_local_model(config: TrainingConfig) -> TrainingConfig:
    """Replace 'embedded' or a hub name by the local directory of the model, fetched on first use."""
    model = resolve_model(config.model)
    load_config(model)  # a missing model is one clear line
    return dataclasses.replace(config, model=str(local_directory(model)))


def load_heads(config: TrainingConfig, shape: ModelShape) -> HeadSet:
    """The core heads, or every head with the prompt of heads.json for the ablation; --headrank-document-layout
    changes that prompt.
    """
    assert config.heads is not None
    heads = HeadSet.load(config.heads)
    if config.document_layout is not None:
        prompt = PromptTemplate.from_dict(heads.prompt.to_dict() | {"document_layout": config.document_layout})
        heads = dataclasses.replace(heads, prompt=prompt)
    if not config.all_heads:
        return heads
    return HeadSet.all_heads(shape.layers, shape.heads, model=heads.model, prompt=heads.prompt)


def prepare_run(config: TrainingConfig, shape: ModelShape, heads: HeadSet) -> tuple[Run, Iterator[Batch | LateBatch]]:
    """Build or resume a run; afterwards only the loop is left."""
    # first of all: what an earlier run wrote decides where this one starts
    config = resolve_start(config)
    data = open_training_data(config, shape, heads)
    held_out = held_out_data(config, shape, heads, data)
    config = config.with_length(len(data))
    announce(config, shape, heads, data, len(held_out))
    checkpoints = RunCheckpoints(config, heads)
    policy = build_policy(config, shape, heads)
    # before the optimizer exists: the reference is the start weights, and its activations and the optimizer's moments
    # need not fit together
    reference = prepare_reference(config, heads, data, policy, is_resuming=checkpoints.resume_iteration is not None)
    model = wrap_model(config, policy)
    optimizer, scheduler = build_optimizer(config, model)
    progress = Progress(**checkpoints.load(model, optimizer, scheduler))
    is_writer = torch.distributed.get_rank() == 0
    run = Run(
        config=config,
        heads=heads,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        held_out=held_out,
        checkpoints=checkpoints,
        metrics=MetricsWriter(config, progress.iteration, is_writer),
        progress=progress,
    )
    batches = training_batches(
        data,
        reference,
        start=progress.consumed_samples,
        rank=data_parallel_rank(),
        world_size=config.data_parallel,
        micro_batch_size=config.micro_batch_size,
        where=device.device(),
        multiple_of=length_multiple(policy.config),
    )
    return run, batches


def announce(
    config: TrainingConfig, shape: ModelShape, heads: HeadSet, data: TrainingSet | LateTrainingSet, num_held_out: int
) -> None:
    """The resolved configuration, once."""
    logger.info("configuration:")
    for name, value in sorted(config.to_dict().items()):
        logger.info("  %s %s", f"{name} ".ljust(30, "."), json.dumps(value))
    names = " ".join(head_name(head) for head in heads.heads[:16]) + (" ..." if len(heads.heads) > 16 else "")
    logger.info("core heads (%d): %s", len(heads.heads), names)
    logger.info(
        "data: %d pairs in %d contexts, %d samples per epoch (%s), %d held-out contexts; %d iterations of %d",
        data.num_pairs,
        data.num_contexts,
        len(data),
        config.epoch_unit,
        num_held_out,
        config.train_iters,
        config.global_batch_size,
    )
    if not config.full_depth:
        logger.info("%s", saving_report(shape, heads.l_max))


def prepare_reference(
    config: TrainingConfig,
    heads: HeadSet,
    data: TrainingSet | LateTrainingSet,
    policy: HeadRankModel,
    *,
    is_resuming: bool,
) -> ReferenceScores | None:
    """Load the start weights into ``policy`` and complete the reference cache with them, or with those of
    --headrank-reference-model, before anything is trained.

    On resume nothing is loaded when the cache is complete; the checkpoint's weights come later, over the start weights.
    """
    if not config.loss.needs_reference:
        if not is_resuming:
            load_start_weights(config, policy)
        return None
    path = config.reference_cache or (None if config.save is None else str(Path(config.save) / REFERENCE_FILE))
    start = (
        config.model
        if config.pretrained_checkpoint is None
        else str(checkpoint_directory(config.pretrained_checkpoint))
    )
    if config.reference_model is not None:
        start = str(local_directory(resolve_model(config.reference_model)))
    key = reference_key(start, heads, data, "bf16" if config.bf16 else "fp32")
    reference = ReferenceScores(path, key)
    # before anyone decides what is missing: ranks that disagreed would wait for each other in different collectives
    reference.share(gather_from_all)
    assert config.train_iters is not None
    needed = list(needed_contexts(data, config.train_iters * config.global_batch_size))
    missing = [(context, order) for context, order in needed if (data.names_of(context)[0], order) not in reference]
    if missing and config.reference_model is not None:
        load_start_weights(dataclasses.replace(config, model=start, pretrained_checkpoint=None), policy)
    elif missing or not is_resuming:
        load_start_weights(config, policy)
    if missing:
        if path is not None and Path(path).is_file():  # a new one was tried before the data were read
            require_place("--headrank-reference-cache", path)
        logger.info("reference scores: computing %d of %d contexts", len(missing), len(needed))
        reference.compute(
            (data.whole_context(context, order) for context, order in missing),
            partial(score_sample, policy, heads=heads, device=device.device()),
            total=len(missing),
            rank=data_parallel_rank(),
            world_size=config.data_parallel,
            is_writer=is_first_tensor_rank(),
            barrier=torch.distributed.barrier,
            gather=gather_from_all,
        )
    if config.reference_model is not None and not is_resuming:
        load_start_weights(config, policy)
    return reference
