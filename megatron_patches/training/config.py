"""One frozen configuration of a run, made from the command line once config_checks.py has refused what is
contradictory.

Functions of the loop receive this object, never the argument namespace. It is printed once and saved with every
checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrank.errors import InputError
from headrank.lora_settings import PROJECTIONS, LoraSettings, ordered
from headrank.method.heads import HeadSet
from headrank.method.loss_settings import DEFAULT_SCALES, EQUAL_LOG_MASS_SCALE, LossSettings
from megatron_patches.shape import ModelShape, check_tensor_parallel_size
from megatron_patches.training.config_checks import check_flags


@dataclass(frozen=True)
class ScheduleConfig:
    """Optimizer and learning-rate schedule, in Megatron's names; steps are counted in samples as Megatron does."""

    lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool


@dataclass(frozen=True)
class TrainingConfig:
    """Everything a run depends on. Paths are as given; ``train_iters`` is None until the data's length is known."""

    model: str
    heads: str | None
    document_layout: str | None
    all_heads: bool
    full_depth: bool
    pretrained_checkpoint: str | None
    tokenizer: str | None
    train_data: tuple[str, ...]  # folders, with their shares as given: DIR or DIR=SHARE
    valid_data: tuple[str, ...] | None
    seq_length: int | None
    epoch_unit: str
    pairs_per_context: int
    passages_per_query: int
    permutations: int
    with_retriever_order: bool
    seed: int
    tensor_parallel: int
    expert_parallel: int
    data_parallel: int
    micro_batch_size: int
    global_batch_size: int
    train_iters: int | None
    train_samples: int | None
    epochs: float
    loss: LossSettings
    has_own_scale: bool  # --headrank-score-scale was given
    train_readout: bool
    readout_lr: float | None
    freeze_embeddings: bool
    schedule: ScheduleConfig
    lora: LoraSettings | None
    bf16: bool
    recompute: bool
    recompute_first_layers: int | None
    recompute_modules: tuple[str, ...]
    transformer_impl: str | None
    moe_grouped_gemm: bool
    attention_backend: str
    rope_fusion: bool
    gradient_accumulation_fusion: bool
    deterministic_mode: bool
    fp8_format: str | None
    fp8_recipe: str
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    sequence_parallel: bool
    tp_comm_overlap: bool
    distributed_timeout_minutes: int
    save: str | None
    load: str | None
    save_interval: int | None
    save_optimizer: bool
    load_optimizer: bool
    finetune: bool
    keep_checkpoints: int
    keep_iters: tuple[int, ...]
    stop_after: int | None
    reference_cache: str | None
    reference_model: str | None
    log_interval: int
    eval_interval: int | None
    eval_iters: int | None
    exit_interval: int | None
    exit_duration_in_mins: int | None
    exit_signal_handler: bool
    max_nan_steps: int
    trainer: str
    megatron_flags: str | None
    tensorboard_dir: str | None
    tensorboard_log_interval: int
    wandb_project: str
    wandb_exp_name: str
    wandb_save_dir: str
    log_throughput: bool
    timing_log_level: int
    timing_log_option: str
    profile: bool
    profile_step_start: int
    profile_step_end: int
    profile_ranks: tuple[int, ...]
    use_pytorch_profiler: bool

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def with_length(self, samples_per_epoch: int) -> TrainingConfig:
        """Fix ``train_iters``: as given, or from --train-samples, or the epochs rounded up to whole steps.

        A run that stops earlier keeps the schedule of that length.
        """
        length = self.train_iters
        if length is None:
            samples = (
                self.train_samples if self.train_samples is not None else math.ceil(self.epochs * samples_per_epoch)
            )
            length = max(1, math.ceil(samples / self.global_batch_size))
        if self.stop_after is None or self.stop_after >= length:
            return dataclasses.replace(self, train_iters=length)
        schedule = dataclasses.replace(self.schedule, lr_decay_iters=self.schedule.lr_decay_iters or length)
        return dataclasses.replace(self, train_iters=self.stop_after, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for logs and checkpoints."""
        return dataclasses.asdict(self)


def config_from(args: argparse.Namespace, world_size: int) -> TrainingConfig:
    """Check the flags against each other and the number of processes, and freeze them."""
    check_flags(args)
    tensor_parallel = args.tensor_model_parallel_size
    if world_size % tensor_parallel:
        raise InputError(
            f"--tensor-model-parallel-size {tensor_parallel} does not divide the {world_size} processes; "
            "change it or torchrun's --nproc-per-node"
        )
    if world_size % args.expert_model_parallel_size:
        raise InputError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} does not divide the {world_size} "
            "processes; "
            "change it or torchrun's --nproc-per-node"
        )
    data_parallel = world_size // tensor_parallel
    global_batch = args.global_batch_size or args.micro_batch_size * data_parallel
    if global_batch % (args.micro_batch_size * data_parallel):
        raise InputError(
            f"--global-batch-size {global_batch} is not divisible by --micro-batch-size {args.micro_batch_size} x "
            f"{data_parallel} data-parallel ranks; use a multiple of {args.micro_batch_size * data_parallel}"
        )
    derived = {
        "model": args.headrank_model,
        "heads": args.headrank_heads,
        "document_layout": args.headrank_document_layout,
        "all_heads": args.headrank_all_heads,
        "full_depth": args.headrank_full_depth,
        "tokenizer": args.tokenizer_model,
        "train_data": tuple(args.train_data_path),
        "valid_data": None if args.valid_data_path is None else tuple(args.valid_data_path),
        "epoch_unit": args.headrank_epoch_unit,
        "pairs_per_context": args.headrank_pairs_per_context,
        "passages_per_query": args.headrank_passages_per_query,
        "permutations": args.headrank_permutations,
        "with_retriever_order": args.headrank_with_retriever_order,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": args.expert_model_parallel_size,
        "data_parallel": data_parallel,
        "global_batch_size": global_batch,
        "epochs": args.headrank_epochs,
        "loss": _loss_from(args),
        "has_own_scale": args.headrank_score_scale is not None,
        "train_readout": args.headrank_train_readout,
        "readout_lr": args.headrank_readout_lr,
        "freeze_embeddings": args.headrank_freeze_embeddings,
        "schedule": ScheduleConfig(**_taken(args, ScheduleConfig)),
        "lora": _lora_from(args),
        "recompute": args.recompute_granularity == "full",
        "recompute_first_layers": args.recompute_num_layers if args.recompute_method == "block" else None,
        "recompute_modules": _recompute_modules(args),
        "sequence_parallel": args.sequence_parallel and tensor_parallel > 1,
        "tp_comm_overlap": args.tp_comm_overlap and tensor_parallel > 1,
        "rope_fusion": not args.no_rope_fusion,
        "gradient_accumulation_fusion": not args.no_gradient_accumulation_fusion,
        "profile_ranks": tuple(args.profile_ranks),
        "save_optimizer": not args.no_save_optim,
        "load_optimizer": not args.no_load_optim,
        "keep_checkpoints": args.headrank_keep_checkpoints,
        "keep_iters": tuple(args.headrank_keep_iters or ()),
        "stop_after": args.headrank_stop_after,
        "reference_cache": args.headrank_reference_cache,
        "reference_model": args.headrank_reference_model,
        "max_nan_steps": args.headrank_max_nan_steps,
        "trainer": args.headrank_trainer,
        "megatron_flags": args.headrank_megatron_flags,
    }
    return TrainingConfig(**{**_taken(args, TrainingConfig), **derived})


def _lora_from(args: argparse.Namespace) -> LoraSettings | None:
    """The adapters to train, or None for full fine-tuning."""
    if not args.headrank_lora_rank:
        return None
    alpha = 2.0 * args.headrank_lora_rank if args.headrank_lora_alpha is None else args.headrank_lora_alpha
    return LoraSettings(args.headrank_lora_rank, alpha, ordered(args.headrank_lora_targets or PROJECTIONS))


def _recompute_modules(args: argparse.Namespace) -> tuple[str, ...]:
    """What is recomputed inside each layer: Megatron's default where only the granularity is given."""
    if not (args.recompute_activations or args.recompute_granularity == "selective"):
        return ()
    return tuple(args.recompute_modules or ["core_attn"])


def _taken(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of ``kind`` that have a flag of the same name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


def _loss_from(args: argparse.Namespace) -> LossSettings:
    scale = args.headrank_score_scale
    return LossSettings(
        objective=args.headrank_loss,
        scaling=args.headrank_score_scaling,
        scale=DEFAULT_SCALES[args.headrank_score_scaling] if scale is None else scale,
        margin=args.headrank_margin,
        linear_weight=args.headrank_alpha,
        proximal_weight=args.headrank_beta,
        entropy_weight=args.headrank_gamma,
        variance_weight=args.headrank_eta,
        temperature=args.headrank_temperature,
        teacher_ranknet_weight=args.headrank_teacher_ranknet,
        teacher_listwise_weight=args.headrank_teacher_listwise,
        teacher_margin_weight=args.headrank_teacher_margin_mse,
        in_batch_weight=args.headrank_in_batch_weight,
        teacher_temperature=args.headrank_teacher_temperature,
    )


def check_heads(heads: HeadSet, shape: ModelShape, config: TrainingConfig) -> None:
    """Refuse heads of another model, heads outside it, and a tensor-parallel size that cuts a key-value group."""
    if (heads.num_layers, heads.num_heads) != (shape.layers, shape.heads):
        raise InputError(
            f"{config.heads}: selected on a model of {heads.num_layers} layers x {heads.num_heads} heads "
            f"({heads.model}), but "
            f"{config.model} has {shape.layers} x {shape.heads}; run 'headrank select-heads' on this model"
        )
    heads.check_fits(shape.layers, shape.heads, config.model)
    check_tensor_parallel_size(shape, config.tensor_parallel)
    check_experts(shape, config)
    # elsewhere --seq-length does not bound a batch
    if config.tp_comm_overlap and heads.prompt.document_layout != "sequential":
        raise InputError(
            f"--tp-comm-overlap needs batches of one length, which the {heads.prompt.document_layout} layout has "
            "not; remove it"
        )
    if heads.prompt.is_late:
        if config.permutations:
            raise InputError("--headrank-permutations: the late layout has no order of passages; remove it")
        return
    if heads.readout is not None and heads.readout.kind != "log-mass":
        raise InputError(
            f"{config.heads}: only readouts of log masses are trained, this one weighs masses; fit one with "
            "--method readout"
        )
    if config.train_readout and heads.readout is None:
        raise InputError(
            f"--headrank-train-readout: {config.heads} has no readout; make one with 'headrank select-heads "
            "--method readout'"
        )
    for flag, is_given in (
        ("--headrank-in-batch-weight", config.loss.in_batch_weight > 0),
        ("--train-data-path with several folders", len(config.train_data) > 1),
        ("--valid-data-path with several folders", len(config.valid_data or ()) > 1),
    ):
        if is_given:
            raise InputError(
                f"{flag} belongs to the late layout, but the prompt of {config.heads} is {heads.prompt.document_layout}"
            )


def check_experts(shape: ModelShape, config: TrainingConfig) -> None:
    """What a mixture of experts asks for, and what is there for it alone."""
    if not shape.experts:
        if config.expert_parallel != 1:
            raise InputError(
                f"--expert-model-parallel-size {config.expert_parallel}: {config.model} has no experts; remove it"
            )
        return
    if shape.experts % config.expert_parallel:
        raise InputError(
            f"--expert-model-parallel-size {config.expert_parallel} does not divide the {shape.experts} experts of "
            "a layer"
        )
    if config.tensor_parallel > 1 and not config.sequence_parallel:
        raise InputError(
            "a model with experts at --tensor-model-parallel-size above 1 needs --sequence-parallel; add it"
        )
    if config.lora is not None:
        raise InputError("--headrank-lora-rank: adapters of models with experts are not supported; train all weights")


def with_readout(config: TrainingConfig, heads: HeadSet) -> TrainingConfig:
    """The loss as it fits the heads' score: log masses have another scale than masses, and a free offset per list.

    Fitted weights make a score of logits; equal weights say nothing about the scale, and a stated constant stands in.
    """
    readout = heads.readout
    if readout is None or readout.kind != "log-mass":
        return config
    loss = dataclasses.replace(config.loss, is_proximal_centred=True)
    if not config.has_own_scale and loss.scaling == "constant":
        is_fitted = len(set(readout.weights)) > 1
        loss = dataclasses.replace(
            loss, scale=1.0 if is_fitted else EQUAL_LOG_MASS_SCALE / sum(map(abs, readout.weights))
        )
    return dataclasses.replace(config, loss=loss)


def changed_fields(saved: Mapping[str, Any], config: TrainingConfig) -> list[str]:
    """Names of settings that change the objective or the data and differ from a checkpoint's, for a warning on
    resume.
    """
    watched = (
        "model",
        "document_layout",
        "all_heads",
        "train_data",
        "epoch_unit",
        "pairs_per_context",
        "passages_per_query",
        "train_readout",
        "readout_lr",
        "freeze_embeddings",
        "permutations",
        "with_retriever_order",
        "seed",
        "global_batch_size",
        "loss",
        "schedule",
        "train_iters",
    )
    current = config.to_dict()
    return [name for name in watched if name in saved and saved[name] != current[name]]
