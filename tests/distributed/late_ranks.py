"""What the ranks of test_late_training.py run: the same lists through the Megatron model at several sizes, in every
layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data_tools.late_training_set import LateTrainingSet
from data_tools.training_set import TrainingSet
from headrank.method.heads import HeadSet
from headrank.method.late_prompt import LateEncoder
from headrank.method.loss_settings import LossSettings
from headrank.method.spans import PromptEncoder
from megatron_patches import device
from megatron_patches.readout_weights import PARAMETER
from tests.distributed.parity_ranks import gather_by_hf_name

LOSS = LossSettings(
    objective="headrank",
    scale=1.0,
    teacher_ranknet_weight=1.0,
    teacher_listwise_weight=0.5,
    in_batch_weight=0.3,
    proximal_weight=0,
)

PROMPT_LOSS = LossSettings(objective="headrank", scale=1.0, proximal_weight=0)
NUM_LISTS = 4


def late_set(model: Path, folder: Path, heads: HeadSet) -> LateTrainingSet:
    """The toy lists, five passages a visit."""
    return LateTrainingSet(
        [folder],
        LateEncoder(AutoTokenizer.from_pretrained(model), heads.prompt),
        passages_per_query=5,
        needs_pairs=True,
    )


def readout_results(
    directory: Path, folder: Path, heads_files: dict[str, Path], sizes: list[int]
) -> dict[int, dict[str, Any]]:
    """For each TP size the late layout (four lists over all data-parallel ranks) and, by name, the prompts' layouts."""
    results: dict[int, dict[str, Any]] = {}
    heads = {name: HeadSet.load(path) for name, path in heads_files.items()}
    for tp in sizes:
        device.initialize(tp)
        results[tp] = {
            name: prompt_layout(directory, folder, one) for name, one in heads.items() if not one.prompt.is_late
        }
        for is_recomputed in (False, True) if tp == 1 else (False,):
            results[tp]["late, recomputed" if is_recomputed else "late"] = late_layout(
                directory, folder, heads["late"], is_recomputed
            )
    device.shutdown()
    return results


def late_layout(directory: Path, folder: Path, heads: HeadSet, is_recomputed: bool) -> dict[str, Any]:
    """Scores of whole lists, loss and gradients of a step of four lists that are spread over the data-parallel
    ranks.
    """
    from megatron.core import parallel_state

    from megatron_patches.training.held_out import score_sample
    from megatron_patches.training.late_batches import make_late_batch
    from megatron_patches.training.train_step import score_batch

    model, bare = wrapped(directory, heads, is_recomputed)
    data, ranks = late_set(directory, folder, heads), parallel_state.get_data_parallel_world_size()
    first, each = parallel_state.get_data_parallel_rank() * NUM_LISTS // ranks, NUM_LISTS // ranks
    batch = make_late_batch(
        tuple(data.at(number) for number in range(first, first + each)), None, device.device()
    ).met_by_all_ranks()
    scores_UC = score_batch(model, batch, heads, is_in_batch=True)
    return {
        "scores": scores_UC.detach(),
        "first": batch.met.first,
        "samples": [(one.query_digest, one.digests.tolist(), one.list_digests.tolist()) for one in batch.samples],
        "negatives": [int(mask.sum()) for mask in batch.met.is_negative],
        "own": score_batch(model, batch, heads).detach(),
        "lists": batch.lists,
        "whole": [
            torch.from_numpy(score_sample(model, data.whole_context(number), heads, device.device()))
            for number in range(3)
        ],
        **loss_and_gradients(model, bare, scores_UC, batch, LOSS),
    }


def prompt_layout(directory: Path, folder: Path, heads: HeadSet) -> dict[str, Any]:
    """The same of three lists that stand in one prompt each; every data-parallel rank has the same ones."""
    from megatron_patches.training.batches import make_batch
    from megatron_patches.training.held_out import score_sample
    from megatron_patches.training.train_step import score_batch

    model, bare = wrapped(directory, heads, False)
    data = TrainingSet(
        folder, PromptEncoder(AutoTokenizer.from_pretrained(directory), heads.prompt, calibrate=False), epoch="contexts"
    )
    batch = make_batch(tuple(data.at(number) for number in range(3)), None, device.device())
    whole = [
        torch.from_numpy(score_sample(model, data.whole_context(number, 0), heads, device.device()))
        for number in range(3)
    ]
    return {"whole": whole, **loss_and_gradients(model, bare, score_batch(model, batch, heads), batch, PROMPT_LOSS)}


def wrapped(directory: Path, heads: HeadSet, is_recomputed: bool) -> tuple[Any, Any]:
    """The model with trained readout weights under DDP, and without it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model

    bare = build_model(ModelShape.from_hf(directory), last_layer=heads.l_max, recompute=is_recomputed)
    bare.train_readout()
    load_hf_weights(bare, directory)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
    model.zero_grad_buffer()
    return model, bare


def loss_and_gradients(
    model: Any, bare: Any, scores: torch.Tensor, batch: Any, settings: LossSettings
) -> dict[str, Any]:
    """Loss and terms averaged over data-parallel ranks, and every gradient whole."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from megatron_patches.parallel_scores import sum_over_data_parallel
    from megatron_patches.training.train_step import batch_loss

    loss, terms = batch_loss(scores, batch, settings)
    loss.backward()
    finalize_model_grads([model])
    gradients = {name: parameter.main_grad for name, parameter in bare.named_parameters()}
    of_readout = gradients.pop(PARAMETER)
    shards = [torch.empty_like(of_readout) for _ in range(bare.tp_group.size())]
    torch.distributed.all_gather(shards, of_readout, group=bare.tp_group)
    terms = sum_over_data_parallel(terms.clone()) / parallel_state.get_data_parallel_world_size()
    return {"terms": terms, "gradients": gather_by_hf_name(bare, gradients) | {PARAMETER: torch.cat(shards, dim=1)}}
