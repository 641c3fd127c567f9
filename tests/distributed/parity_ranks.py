"""What the ranks of test_megatron_parity.py run: the same batch through the Megatron model at several TP sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from headrank.method.attention import batch_contexts
from headrank.method.spans import EncodedContext
from megatron_patches import device
from tests.distributed.eager_reference import toy_loss


def gather_by_hf_name(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sharded tensors (weights or gradients) of a model, whole and under Hugging Face names; replicas must agree."""
    from megatron_patches.checkpoints.weights import mapping_of, split_sources

    result: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        row = mapping_of(name)
        shards = [torch.empty_like(value) for _ in range(model.tp_group.size())]
        torch.distributed.all_gather(shards, value.contiguous(), group=model.tp_group)
        if row.axis is None:
            for shard in shards:
                torch.testing.assert_close(
                    shard,
                    shards[0],
                    rtol=1e-4,
                    atol=1e-7,
                    msg=lambda text, name=name: f"{name} differs between ranks: {text}",
                )
            whole = shards[0]
        elif row.join == "stack":
            halves = [shard.chunk(2) for shard in shards]
            whole = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        else:
            whole = torch.cat(shards, dim=row.axis)
        result.update(split_sources(row, whole, model.shape))
    return result


def scores_and_gradients(
    directory: Path, contexts: list[EncodedContext], heads: dict[int, list[int]], tp: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Scores, loss and gradients by Hugging Face name, through DDP and Megatron's gradient finalisation."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model
    from megatron_patches.parallel_scores import core_head_scores

    bare = build_model(ModelShape.from_hf(directory), **options)
    load_hf_weights(bare, directory)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
    model.zero_grad_buffer()
    ids_BS, layout = batch_contexts(contexts)
    scores_BN = core_head_scores(model(ids_BS, layout, heads), layout)
    loss = toy_loss(scores_BN, layout.num_documents_B)
    loss.backward()
    finalize_model_grads([model])
    gradients = {name: parameter.main_grad for name, parameter in bare.named_parameters()}
    return scores_BN.detach(), loss.detach(), gather_by_hf_name(bare, gradients)


def compare_sizes(
    directory: Path, contexts: list[EncodedContext], heads: dict[int, list[int]], sizes: list[int]
) -> dict[int, dict[str, Any]]:
    """Everything the parity tests look at, for each TP size, in one world."""
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model
    from tests.distributed.all_heads import all_head_statistics

    results: dict[int, dict[str, Any]] = {}
    shape = ModelShape.from_hf(directory)
    ids_BS, layout = batch_contexts(contexts)
    plain = [
        dataclasses.replace(
            context,
            input_ids=context.input_ids[: -context.calibration_length],
            calibration_length=0,
            calibration_rows=(0, 0),
        )
        for context in contexts
    ]
    plain_ids_BS, plain_layout = batch_contexts(plain)
    last_layer = max(heads)
    for tp in sizes:
        device.initialize(tp)
        model = build_model(shape, has_output=True)
        load_hf_weights(model, directory)
        with torch.no_grad():
            logits = model.logits(plain_ids_BS, plain_layout)
            everything = {layer: range(shape.heads) for layer in range(shape.layers)}
            statistics = all_head_statistics(model(ids_BS, layout, everything), layout)
        one_rank_only = {layer: [0] for layer in heads}
        results[tp] = {
            "logits": logits,
            "statistics": statistics,
            "truncated": scores_and_gradients(directory, contexts, heads, tp, last_layer=last_layer),
            "recomputed": scores_and_gradients(directory, contexts, heads, tp, last_layer=last_layer, recompute=True),
            "full": scores_and_gradients(directory, contexts, heads, tp),
            "heads of rank 0": scores_and_gradients(directory, contexts, one_rank_only, tp, last_layer=last_layer),
        }
    device.shutdown()
    return results
