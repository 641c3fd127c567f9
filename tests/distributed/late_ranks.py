"""What the ranks of test_late_training.py run: one late micro-batch through the Megatron model at several TP sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data_tools.late_training_set import LateTrainingSet
from headrank.method.heads import HeadSet
from headrank.method.late_prompt import LateEncoder
from headrank.method.loss_settings import LossSettings
from megatron_patches import device
from megatron_patches.readout_weights import PARAMETER
from tests.distributed.parity_ranks import gather_by_hf_name

LOSS = LossSettings(
    objective="headrank", scale=1.0, teacher_ranknet_weight=1.0, teacher_listwise_weight=0.5, in_batch_weight=0.3, proximal_weight=0
)


def late_set(model: Path, folder: Path, heads: HeadSet) -> LateTrainingSet:
    """The toy lists, five passages a visit."""
    return LateTrainingSet(
        [folder], LateEncoder(AutoTokenizer.from_pretrained(model), heads.prompt), passages_per_query=5, needs_pairs=True
    )


def late_results(directory: Path, folder: Path, heads_file: Path, sizes: list[int]) -> dict[int, dict[str, Any]]:
    """Scores of whole lists, the loss of a micro-batch of three, and all gradients, for each TP size."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model
    from megatron_patches.training.held_out import score_sample
    from megatron_patches.training.late_batches import make_late_batch
    from megatron_patches.training.train_step import batch_loss, score_batch

    heads, results = HeadSet.load(heads_file), {}
    data = late_set(directory, folder, heads)
    for tp in sizes:
        device.initialize(tp)
        for is_recomputed in (False, True) if tp == 1 else (False,):
            bare = build_model(ModelShape.from_hf(directory), last_layer=heads.l_max, recompute=is_recomputed)
            bare.train_readout()
            load_hf_weights(bare, directory)
            model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
            model.zero_grad_buffer()
            batch = make_late_batch(tuple(data.at(number) for number in range(3)), None, device.device())
            scores_UN = score_batch(model, batch, heads, is_in_batch=True)
            own_UN = score_batch(model, batch, heads)
            loss, terms = batch_loss(scores_UN, batch, LOSS)
            loss.backward()
            finalize_model_grads([model])
            gradients = {name: parameter.main_grad for name, parameter in bare.named_parameters()}
            of_readout = gradients.pop(PARAMETER)
            shards = [torch.empty_like(of_readout) for _ in range(tp)]
            torch.distributed.all_gather(shards, of_readout, group=bare.tp_group)
            results[f"{tp} recomputed" if is_recomputed else tp] = {
                "scores": scores_UN.detach(),
                "own": own_UN.detach(),
                "lists": batch.lists,
                "whole": [torch.from_numpy(score_sample(model, data.whole_context(number), heads, device.device())) for number in range(3)],
                "loss": loss.detach(),
                "terms": terms,
                "gradients": gather_by_hf_name(bare, gradients) | {PARAMETER: torch.cat(shards, dim=1)},
            }
    device.shutdown()
    return results
