"""From a configuration to Megatron's moving parts: truncated model, DDP, optimizer and parameter scheduler."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from headrank.method.heads import HeadSet
from megatron_patches.kernels import kernel_settings, one_length
from megatron_patches.layer_spec import chosen_engine
from megatron_patches.lora import freeze_base
from megatron_patches.model import HeadRankModel, build_model, build_transformer_config
from megatron_patches.readout_weights import PARAMETER
from megatron_patches.shape import ModelShape
from megatron_patches.training.config import TrainingConfig

logger = logging.getLogger(__name__)

ADAM_BYTES = 16  # float32 weight, gradient and two moments


def build_policy(config: TrainingConfig, shape: ModelShape, heads: HeadSet) -> HeadRankModel:
    """The model to train on this rank, weights undefined: layers 0..l_max, or all of them with the unused ones frozen.

    With adapters everything else is frozen. Weight decay acts on adapters as on any matrix: it draws the model towards
    its base.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    use_engine = chosen_engine(config.transformer_impl, dtype)
    transformer_config = build_transformer_config(
        shape,
        tensor_model_parallel_size=config.tensor_parallel,
        dtype=dtype,
        **layer_settings(config),
        **kernel_settings(config, use_engine=use_engine),
        # Not perform_initialization=False: Megatron marks weights as tensor-parallel while it initialises them, and
        # unmarked ones are
        # left out of the gradient norm on all ranks but the first.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
    )
    if config.tp_comm_overlap:
        transformer_config.fixed_length = one_length(config)  # type: ignore[attr-defined]
    model = build_model(
        shape,
        last_layer=None if config.full_depth else heads.l_max,
        transformer_config=transformer_config,
        use_transformer_engine=use_engine,
        lora=config.lora,
    )
    if config.bf16:
        model.bfloat16()  # norms too: Transformer Engine's ignore params_dtype, and the optimizer cannot save a mixture
    if config.full_depth:
        _freeze_unused(model, heads.l_max)
    if config.freeze_embeddings:
        model.embedding.requires_grad_(False)
    if config.lora is not None:
        freeze_base(model)
    if config.train_readout:  # after the base is frozen: it is trained beside adapters too
        model.train_readout()
    return model


def layer_settings(config: TrainingConfig) -> dict[str, Any]:
    """The settings of build_transformer_config that say how layers compute, not what."""
    return {
        "recompute": config.recompute,
        "recompute_first_layers": config.recompute_first_layers,
        "recompute_modules": config.recompute_modules,
        "sequence_parallel": config.sequence_parallel,
        **({"moe_grouped_gemm": True} if config.moe_grouped_gemm else {}),
    }


def _leave_as_is(weight: torch.Tensor) -> None:
    """An initialisation that does nothing: the weights are about to be loaded."""


def _freeze_unused(model: HeadRankModel, last_layer: int) -> None:
    """No loss reaches these weights: without a gradient they must not decay either."""
    for number, layer in enumerate(model.decoder.layers):
        if number >= last_layer:
            for name, parameter in layer.named_parameters():
                is_read = (number == last_layer and "v_proj" not in name) and (
                    "linear_qkv" in name or "input_layernorm" in name or "q_layernorm" in name or "k_layernorm" in name
                )
                parameter.requires_grad_(is_read)


def wrap_model(config: TrainingConfig, model: HeadRankModel) -> DistributedDataParallel:
    """Megatron's DDP with float32 gradient buffers, and its gradient finalisation hooked into the schedule."""
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            use_distributed_optimizer=config.use_distributed_optimizer,
        ),
        module=model,
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        model.config.no_sync_func = ddp.no_sync
    if config.overlap_param_gather:
        model.config.param_sync_func = ddp.start_param_sync
    return ddp


def build_optimizer(
    config: TrainingConfig, ddp: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW through Megatron, and its schedule counted in samples over ``train_iters`` steps."""
    schedule = config.schedule
    settings = OptimizerConfig(
        optimizer="adam",
        lr=schedule.lr,
        min_lr=schedule.min_lr,
        weight_decay=schedule.weight_decay,
        adam_beta1=schedule.adam_beta1,
        adam_beta2=schedule.adam_beta2,
        adam_eps=schedule.adam_eps,
        clip_grad=schedule.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(settings, [ddp], config_overrides=_parameter_groups(config, settings))
    _fuse_adam(optimizer)
    ddp.module.config.grad_scale_func = optimizer.scale_loss
    assert config.train_iters is not None, "the length of the run is fixed before its schedule"
    decay_steps = (schedule.lr_decay_iters or config.train_iters) * config.global_batch_size
    # of a run that stops early the length is the schedule's: it may go on later without --headrank-stop-after
    length = config.train_iters * config.global_batch_size if config.stop_after is None else decay_steps
    warmup_steps = schedule.lr_warmup_iters * config.global_batch_size
    if schedule.lr_warmup_fraction is not None:
        warmup_steps = int(schedule.lr_warmup_fraction * decay_steps)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=min(warmup_steps, decay_steps - 1),
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.weight_decay,
        end_wd=schedule.weight_decay,
        wd_incr_steps=length,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
    )
    return optimizer, scheduler


def _parameter_groups(config: TrainingConfig, settings: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own groups (no decay for norms and biases) and one for trained readout weights: no decay, a rate of
    their own.
    """
    groups = get_standard_config_overrides(settings)
    if config.train_readout:
        schedule = config.schedule
        peak = schedule.lr if config.readout_lr is None else config.readout_lr
        rates = {"max_lr": peak, "min_lr": schedule.min_lr * peak / schedule.lr}
        # a checkpoint's groups are told apart by decay and this mark, not by their rates: without it the group of the
        # norms,
        # which has no decay either, would be taken for this one, and no run that trains both could resume
        mark: Any = {"is_decoupled_lr": True}
        groups[ParamKey(name=f"*{PARAMETER}")] = ParamGroupOverride(wd_mult=0.0, **rates, **mark)
    return groups


def _fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Where Megatron fell back to torch's AdamW (no Apex, no Transformer Engine), take its one-kernel version: a
    third of the time.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in [part.optimizer.defaults, *part.optimizer.param_groups]:
                group["fused"] = True


def count_parameters(shape: ModelShape, last_layer: int | None = None) -> int:
    """Decoder and embedding parameters of the whole model, or of the truncated one (its last layer has Q and K
    only).
    """
    query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    norms = 2 * shape.head_dim if shape.has_qk_norm else 0
    reading = shape.hidden * (query + key) + norms + shape.hidden + ((query + key) if shape.has_qkv_bias else 0)
    mlp = 3 * shape.hidden * shape.ffn
    if shape.experts:
        mlp = shape.experts * (3 * shape.hidden * shape.expert_ffn + shape.hidden)  # and a row of the router each
    rest = shape.hidden * key + query * shape.hidden + mlp + shape.hidden + (key if shape.has_qkv_bias else 0)
    embedding = shape.vocab * shape.hidden
    if last_layer is not None:
        return embedding + last_layer * (reading + rest) + reading
    output = shape.hidden + (0 if shape.is_tied else embedding)
    return embedding + shape.layers * (reading + rest) + output


def step_flops(shape: ModelShape, last_layer: int, num_tokens: int, sequence_length: float) -> float:
    """Model FLOPs of forward and backward over some tokens: 6 a weight and token, causal attention counted at half."""
    # without the embedding: looking a row up is no product
    matrices = count_parameters(shape, last_layer) - shape.vocab * shape.hidden
    idle = shape.experts - shape.experts_per_token  # experts that a token does not visit
    matrices -= last_layer * idle * 3 * shape.hidden * shape.expert_ffn
    attention = last_layer * shape.heads * shape.head_dim * sequence_length
    return 6.0 * num_tokens * (matrices + attention)


def saving_report(shape: ModelShape, last_layer: int) -> str:
    """What leaving out everything above l_max saves: parameters, optimizer bytes, FLOPs of matrix products a token."""
    full, kept = count_parameters(shape), count_parameters(shape, last_layer)
    embedding = shape.vocab * shape.hidden
    full_flops, kept_flops = 6 * (full - embedding * (1 if shape.is_tied else 2)), 6 * (kept - embedding)
    less = 100 * (1 - kept_flops / full_flops)
    return (
        f"exact truncation at layer {last_layer} of {shape.layers - 1}: {kept / 1e6:.1f}M of {full / 1e6:.1f}M "
        "parameters "
        f"({100 * (1 - kept / full):.0f}% less), {kept * ADAM_BYTES / 2**30:.2f} of {full * ADAM_BYTES / 2**30:.2f} "
        "GiB of weights, "
        f"gradients and moments, {kept_flops / 1e9:.2f} of {full_flops / 1e9:.2f} GFLOP a token ({less:.0f}% less)"
    )


def data_parallel_rank() -> int:
    """This process's place among the data-parallel ranks."""
    return parallel_state.get_data_parallel_rank()


def is_first_tensor_rank() -> bool:
    """One process of each tensor-parallel group, the one that writes."""
    return parallel_state.get_tensor_model_parallel_rank() == 0
