"""What the ranks of test_lora.py run: adapters read from a checkpoint, their gradients gathered under peft's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrank.lora_settings import PROJECTIONS, LoraSettings
from headrank.method.attention import batch_contexts
from headrank.method.spans import EncodedContext
from megatron_patches import device
from tests.distributed.eager_reference import toy_loss


def import_with_adapter(model: Path, adapter: Path, root: Path) -> None:
    """What 'headrank import-hf --adapter' does."""
    from headrank.reranking.peft_folder import PeftAdapter
    from megatron_patches.checkpoints.conversion import import_hf

    device.initialize(1)
    import_hf(model, root, adapter=PeftAdapter.read(adapter))
    device.shutdown()


def gather_adapter(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapter tensors of all ranks, whole and under peft's names; replicas must agree."""
    from megatron_patches.lora import CUT_BY_INPUTS, adapter_parameter

    whole = {}
    for name, value in values.items():
        place = adapter_parameter(name)
        assert place is not None, name
        layer, projection, factor = place
        shards = [torch.empty_like(value) for _ in range(model.tp_group.size())]
        torch.distributed.all_gather(shards, value.contiguous(), group=model.tp_group)
        is_cut = (projection in CUT_BY_INPUTS) == (factor == "lora_A")
        if not is_cut:
            for shard in shards:
                torch.testing.assert_close(shard, shards[0], rtol=1e-4, atol=1e-7)
        joined = torch.cat(shards, dim=1 if factor == "lora_A" else 0) if is_cut else shards[0]
        whole[
            f"base_model.model.model.layers.{layer}.{PROJECTIONS[projection]}.{projection}.{factor}.default.weight"
        ] = joined
    return whole


def adapted_scores(
    root: Path,
    shape: Any,
    lora: LoraSettings,
    contexts: list[EncodedContext],
    heads: dict[int, list[int]],
    **options: Any,
) -> dict[str, Any]:
    """Scores, loss and gradients through DDP and Megatron's finalisation; what has a gradient buffer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megatron_patches.checkpoints.files import load_checkpoint
    from megatron_patches.lora import freeze_base
    from megatron_patches.model import build_model, build_transformer_config
    from megatron_patches.parallel_scores import core_head_scores

    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = build_transformer_config(shape, tensor_model_parallel_size=tp, **options)
    bare = build_model(shape, last_layer=max(heads), transformer_config=config, lora=lora)
    load_checkpoint(root, bare)
    freeze_base(bare)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
    model.zero_grad_buffer()
    longest = max(context.length for context in contexts)
    ids_BS, layout = batch_contexts(contexts, pad_to=-(-longest // tp) * tp)  # sequence parallelism cuts it evenly
    scores_BN = core_head_scores(model(ids_BS, layout, heads), layout)
    loss = toy_loss(scores_BN, layout.num_documents_B)
    loss.backward()
    finalize_model_grads([model])
    buffered = {
        name: parameter.main_grad for name, parameter in bare.named_parameters() if hasattr(parameter, "main_grad")
    }
    return {"scores": scores_BN.detach(), "loss": loss.detach(), "gradients": gather_adapter(bare, buffered)}


def compare_sizes(
    model: Path,
    root: Path,
    lora: LoraSettings,
    contexts: list[EncodedContext],
    heads: dict[int, list[int]],
    sizes: list[int],
) -> dict[tuple[int, str], dict[str, Any]]:
    """Every TP size: plain, recomputed, and with sequence parallelism."""
    from megatron_patches.shape import ModelShape

    shape, results = ModelShape.from_hf(model), {}
    for tp in sizes:
        device.initialize(tp)
        variants: dict[str, dict[str, Any]] = {"plain": {}, "recomputed": {"recompute": True}}
        if tp > 1:
            variants["sequence parallel"] = {"sequence_parallel": True}
        for name, options in variants.items():
            results[tp, name] = adapted_scores(root, shape, lora, contexts, heads, **options)
    device.shutdown()
    return results
