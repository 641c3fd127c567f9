"""What the ranks of test_core_attention.py run: other families, the fused slot, stock GPTModel with our layer spec,
bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrank.method.attention import batch_contexts
from headrank.method.spans import EncodedContext
from megatron_patches import device
from tests.distributed.conversion_ranks import request


def family_scores(
    directories: list[Path], contexts: list[EncodedContext], heads: dict[int, list[int]]
) -> dict[str, Any]:
    """Core-head scores and all-head statistics of each model at this world's TP."""
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model
    from megatron_patches.parallel_scores import core_head_scores
    from tests.distributed.all_heads import all_head_statistics

    device.initialize(2)
    results: dict[str, Any] = {}
    ids_BS, layout = batch_contexts(contexts)
    for directory in directories:
        shape = ModelShape.from_hf(directory)
        truncated, full = build_model(shape, last_layer=max(heads)), build_model(shape)
        load_hf_weights(truncated, directory)
        load_hf_weights(full, directory)
        with torch.no_grad():
            scores = core_head_scores(truncated(ids_BS, layout, heads), layout)
            raw = core_head_scores(truncated(ids_BS, layout, heads), layout, is_calibrated=False)
            everything = {layer: range(shape.heads) for layer in range(shape.layers)}
            statistics = all_head_statistics(full(ids_BS, layout, everything), layout)
        results[directory.name] = {"scores": scores, "raw": raw, "statistics": statistics}
    device.shutdown()
    return results


def slots(directory: Path, contexts: list[EncodedContext], heads: dict[int, list[int]], place: Path) -> dict[str, Any]:
    """Scores with SDPA, with another module in the fused slot, in bf16; stock GPTModel with our spec, saved its own
    way, exported.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_patches import layer_spec
    from megatron_patches.attention import FusedHeadRankCoreAttention, HeadRankCoreAttention, RowCapture
    from megatron_patches.checkpoints.export import export_hf
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.checkpoints.writers import prepare_writers
    from megatron_patches.model import ModelShape, build_model, build_transformer_config
    from megatron_patches.parallel_scores import core_head_scores

    class StandInFused(FusedHeadRankCoreAttention):
        """Transformer Engine's module takes and gives the same shapes as Megatron's own."""

        def _build_fused(self, **arguments: Any) -> torch.nn.Module:
            return DotProductAttention(**arguments)

    device.initialize(2)
    shape = ModelShape.from_hf(directory)
    ids_BS, layout = batch_contexts(contexts)
    found: dict[str, Any] = {}

    def scores(**options: Any) -> torch.Tensor:
        model = build_model(shape, last_layer=max(heads), **options)
        load_hf_weights(model, directory)
        with torch.no_grad():
            return core_head_scores(model(ids_BS, layout, heads), layout)

    found["sdpa"] = scores()
    found["bf16"] = scores(dtype=torch.bfloat16)
    layer_spec.HeadRankCoreAttention = StandInFused
    found["fused"] = scores()
    layer_spec.HeadRankCoreAttention = HeadRankCoreAttention

    config = build_transformer_config(shape, tensor_model_parallel_size=2)
    stock = GPTModel(
        config,
        layer_spec.QWEN3_LAYER_SPEC,
        vocab_size=shape.padded_vocab(2),
        max_sequence_length=shape.max_positions,
        parallel_output=False,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_base=int(shape.rotary_base),
    )
    stock.shape, stock.tp_group, stock.padded_vocab_size = shape, stock.pg_collection.tp, shape.padded_vocab(2)
    load_hf_weights(stock, directory)
    context = contexts[0]
    plain = EncodedContext(
        context.input_ids[: -context.calibration_length],
        context.prefix_length,
        context.query_length,
        0,
        context.query_rows,
        (0, 0),
        context.document_spans,
    )
    plain_ids_BS, plain_layout = batch_contexts([plain])
    first = stock.pg_collection.tp.rank() * (shape.heads // 2)
    capture = RowCapture(layout=plain_layout, local_heads_by_layer={1: range(shape.heads // 2)})
    with torch.no_grad():
        found["stock logits"] = stock(plain_ids_BS, plain_layout.position_ids_BS, None)[..., : shape.vocab]
        found["stock logits while capturing"] = stock(
            plain_ids_BS, plain_layout.position_ids_BS, None, packed_seq_params=capture
        )[..., : shape.vocab]
    found["stock rows"] = (first, capture.rows[1][0])
    saved = place / "megatron" / "iter_0000005"
    if torch.distributed.get_rank() == 0:
        saved.mkdir(parents=True)
        (place / "megatron" / "latest_checkpointed_iteration.txt").write_text("5")
    torch.distributed.barrier()
    prepare_writers()  # Megatron would start a manager process, which nobody ends
    # layers stacked: no metadata of ours
    dist_checkpointing.save({"iteration": 5, "model": stock.sharded_state_dict()}, str(saved))
    export_hf(request(place / "megatron", directory, place / "hf"))
    device.shutdown()
    return found


def embedded_scores(
    directory: Path, contexts: list[EncodedContext], heads: dict[int, list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The embedded model's scores at TP 3, and the sum of all heads' masses in its last captured layer."""
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model, build_transformer_config
    from megatron_patches.parallel_scores import core_head_scores
    from tests.distributed.all_heads import all_head_statistics

    device.initialize(3)
    shape = ModelShape.from_hf(directory)
    config = build_transformer_config(shape, tensor_model_parallel_size=3, perform_initialization=False)
    model = build_model(shape, last_layer=max(heads), transformer_config=config)
    load_hf_weights(model, directory)
    ids_BS, layout = batch_contexts(contexts)
    with torch.no_grad():
        scores = core_head_scores(model(ids_BS, layout, heads), layout)
        masses = all_head_statistics(model(ids_BS, layout, {max(heads): range(shape.heads)}), layout)[0]
    device.shutdown()
    return scores, masses
