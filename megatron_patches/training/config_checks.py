"""What a command line may not say: tables of mistakes, each one line that names the flag and what to change.

Nothing here needs torch or a process group, so a mistake is found before data, models or scores are touched.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from headrank.errors import InputError
from headrank.files import require_writable

MAX_PERMUTATIONS = 100
_LARGEST_INTEGER = 2**31 - 1
_MINUTES_OF_A_YEAR = 525_600
_MAX_EPOCHS = 1_000_000
_REQUIRED = ("headrank_model", "headrank_heads", "train_data_path", "lr")

# what a value that is given must satisfy, in words, and the attributes it holds for
_RANGES: list[tuple[Callable[[float], bool], str, tuple[str, ...]]] = [
    (lambda value: value > 0, "must be above 0", (
        "train_iters", "train_samples", "save_interval", "eval_interval", "eval_iters", "exit_interval",
        "exit_duration_in_mins", "log_interval", "tensorboard_log_interval", "seq_length", "micro_batch_size",
        "global_batch_size", "tensor_model_parallel_size", "expert_model_parallel_size",
        "lr", "lr_decay_iters", "adam_eps", "recompute_num_layers", "headrank_pairs_per_context",
        "headrank_stop_after", "headrank_max_nan_steps", "headrank_temperature",
        "headrank_score_scale",
        "headrank_readout_lr", "headrank_teacher_temperature", "headrank_lora_alpha")),
    (lambda value: value >= 0, "must not be below 0", (
        "seed", "min_lr", "lr_warmup_iters", "lr_warmup_init", "weight_decay", "clip_grad", "num_workers",
        "headrank_keep_checkpoints", "headrank_in_batch_weight", "headrank_teacher_ranknet",
        "headrank_teacher_listwise", "headrank_teacher_margin_mse", "headrank_alpha", "headrank_beta",
        "headrank_gamma", "headrank_eta", "headrank_margin", "headrank_lora_rank", "profile_step_start")),
    (lambda value: 0 <= value < 1, "must be at least 0 and below 1",
        ("adam_beta1", "adam_beta2", "lr_warmup_fraction")),
    (lambda value: 0 < value <= _MINUTES_OF_A_YEAR, f"must be from 1 to {_MINUTES_OF_A_YEAR}, a year",
        ("distributed_timeout_minutes",)),
    (lambda value: 0 < value <= _MAX_EPOCHS, f"must be above 0 and at most {_MAX_EPOCHS}", ("headrank_epochs",)),
    (lambda value: value >= 2, "must be at least 2", ("headrank_passages_per_query",)),
    (lambda value: 0 <= value <= MAX_PERMUTATIONS, (
        f"must be from 0 to {MAX_PERMUTATIONS}: each is another order of every list to score and to keep"),
        ("headrank_permutations",)),
]  # fmt: skip


def check_flags(args: argparse.Namespace) -> None:
    """Refuse values that are missing, empty or out of range, then flags that contradict each other or this recipe."""
    for name, value in vars(args).items():
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and not text.strip() for text in texts) and not name.startswith("wandb_"):
            raise InputError(f"{_flag(name)} is empty (an unset shell variable?); give a value or remove the flag")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{_flag(name)} {value} is not a finite number")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise InputError(f"{_flag(name)} {value} must be at most {_LARGEST_INTEGER} in size")
    for name in _REQUIRED:
        if getattr(args, name) is None:
            raise InputError(f"{_flag(name)} is missing; see --help")
    for is_right, words, names in _RANGES:
        for name in names:
            value = getattr(args, name)
            if value is not None and not is_right(value):
                raise InputError(f"{_flag(name)} {value} {words}")
    _refuse(_unsupported(args))
    _refuse(_contradictions(args))


def _unsupported(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """What Megatron can do and this recipe cannot."""
    return [
        (args.pipeline_model_parallel_size != 1,
         (f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} is not supported, "
         "only 1: core heads lie in many layers and share one loss; use tensor and data parallelism")),
        (args.context_parallel_size != 1,
         (f"--context-parallel-size {args.context_parallel_size} is not supported, only 1: "
         "I_q attends to the whole sequence; remove it")),
        (args.fp16, "--fp16 is not supported: calibrated masses lose their digits in float16; use --bf16 or nothing"),
        (args.recompute_method != "block" and args.recompute_num_layers not in (None, 1), (
         f"--recompute-num-layers {args.recompute_num_layers} is not supported with the method 'uniform': "
         "layers are recomputed one by one; use 1, or --recompute-method block")),
        (args.ckpt_format != "torch_dist", f"--ckpt-format {args.ckpt_format} is not supported; use torch_dist"),
    ]  # fmt: skip


def _contradictions(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Flags that do not go together; values are known to be in range."""
    shortest = min([length for length in (args.train_iters, args.lr_decay_iters) if length is not None], default=None)
    return [
        (args.overlap_param_gather and not args.use_distributed_optimizer,
         "--overlap-param-gather needs --use-distributed-optimizer"),
        (args.recompute_activations and args.recompute_granularity == "full",
         ("--recompute-activations means --recompute-granularity "
         "selective, but 'full' is given; remove one")),
        (args.recompute_method is not None and args.recompute_granularity != "full",
         (f"--recompute-method {args.recompute_method} goes "
         "with --recompute-granularity full; add it")),
        (args.recompute_method == "block" and args.recompute_num_layers is None,
         "--recompute-method block needs --recompute-num-layers N, the layers to recompute"),
        (bool(args.recompute_modules) and not (args.recompute_activations or args.recompute_granularity == "selective"),
         "--recompute-modules goes with --recompute-granularity selective; add it"),
        (min(args.headrank_keep_iters or [1]) < 1,
         f"--headrank-keep-iters {args.headrank_keep_iters}: steps are counted from 1"),
        (bool(args.headrank_keep_iters) and args.save is None, "--headrank-keep-iters needs a directory; add --save"),
        (args.train_iters is not None and args.train_samples is not None,
         "--train-iters and --train-samples contradict; give one"),
        (args.eval_interval is not None and args.valid_data_path is None,
         "--eval-interval needs held-out queries; add --valid-data-path"),
        (args.save_interval is not None and args.save is None, "--save-interval needs a directory; add --save"),
        (args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler, (
         "--override-opt-param-scheduler and "
         "--use-checkpoint-opt-param-scheduler contradict each other; give one")),
        (args.min_lr > args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}; lower it"),
        (args.lr_warmup_init > args.lr, f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}; lower it"),
        (args.lr_warmup_iters > 0 and args.lr_warmup_fraction is not None,
         ("--lr-warmup-iters and --lr-warmup-fraction "
         "contradict; give one")),
        (shortest is not None and args.lr_warmup_iters > shortest,
         (f"--lr-warmup-iters {args.lr_warmup_iters} is longer than the "
         f"{shortest} steps of --train-iters or --lr-decay-iters; lower it")),
        (args.headrank_with_retriever_order and not args.headrank_permutations,
         ("--headrank-with-retriever-order goes with shuffles; add "
         "--headrank-permutations N, without which the retriever's order is all there is")),
        (args.headrank_readout_lr is not None and not args.headrank_train_readout,
         ("--headrank-readout-lr goes with trained weights; add "
         "--headrank-train-readout")),
        (not args.headrank_lora_rank and args.headrank_lora_alpha is not None,
         ("--headrank-lora-alpha goes with adapters; add "
         "--headrank-lora-rank N")),
        (not args.headrank_lora_rank and args.headrank_lora_targets is not None,
         ("--headrank-lora-targets goes with adapters; add "
         "--headrank-lora-rank N")),
        (args.tp_comm_overlap and not args.sequence_parallel,
         "--tp-comm-overlap overlaps what --sequence-parallel sends; add it"),
        (args.tp_comm_overlap and args.seq_length is None,
         "--tp-comm-overlap has buffers of one size; add --seq-length N"),
        (args.fp8_format is not None and not args.bf16, f"--fp8-format {args.fp8_format} goes with --bf16; add it"),
        (args.profile and args.profile_step_end <= args.profile_step_start,
         (f"--profile-step-end {args.profile_step_end} is not after "
         f"--profile-step-start {args.profile_step_start}")),
        (args.headrank_megatron_flags is not None and args.headrank_trainer != "megatron",
         ("--headrank-megatron-flags go with "
         "--headrank-trainer megatron; add it")),
        (args.use_pytorch_profiler and not args.profile, "--use-pytorch-profiler goes with --profile; add it"),
        (args.use_pytorch_profiler and args.save is None and args.tensorboard_dir is None,
         "--use-pytorch-profiler needs a place for its traces; add --save or --tensorboard-dir"),
        (args.finetune and args.load is None and args.pretrained_checkpoint is None,
         ("--finetune needs weights to start from; "
         "add --load or --pretrained-checkpoint, or remove it")),
        (args.finetune and args.load is not None and args.pretrained_checkpoint is not None,
         ("--finetune starts from one checkpoint, but "
         f"--load {args.load} and --pretrained-checkpoint {args.pretrained_checkpoint} are given; give one")),
        (args.finetune and args.load is not None and args.save is not None
         and os.path.realpath(args.load) == os.path.realpath(args.save),
         f"--finetune starts again at iteration 0, but --load and --save are both {args.save}; give another --save"),
    ]  # fmt: skip


def check_machine(args: argparse.Namespace, *, has_cuda: bool, has_transformer_engine: bool) -> None:
    """The backend follows from the machine, Transformer Engine may be missing; asking for what is not there is a
    mistake worth a line.
    """
    has_engine = has_transformer_engine and args.transformer_impl != "local"
    backend, machine = ("nccl", "has GPUs") if has_cuda else ("gloo", "has no GPU that torch can use")
    _refuse([
        (args.distributed_backend not in (None, backend),
         f"--distributed-backend {args.distributed_backend}: this machine {machine}; use {backend} or remove the flag"),
        (args.transformer_impl == "transformer_engine" and not has_transformer_engine,
         ("--transformer-impl transformer_engine: "
         "Transformer Engine cannot be used here (it needs a GPU and headrank[gpu]); use local or remove the flag")),
        (args.tp_comm_overlap and not has_engine, "--tp-comm-overlap needs Transformer Engine's layers; remove it"),
        (args.moe_grouped_gemm and not has_engine, "--moe-grouped-gemm needs Transformer Engine's layers; remove it"),
        (args.fp8_format is not None and not has_engine,
         f"--fp8-format {args.fp8_format} needs Transformer Engine's layers; remove it"),
        (args.profile and not args.use_pytorch_profiler and not has_cuda,
         "--profile is for nsys, which looks at GPUs; add "
         "--use-pytorch-profiler"),
    ])  # fmt: skip


def check_outputs(args: argparse.Namespace, *, is_writer: bool) -> None:
    """Packages that write are installed and, for the rank that writes, places can be written to."""
    for flag, package, wanted in (
        ("--tensorboard-dir", "tensorboard", args.tensorboard_dir),
        ("--wandb-project", "wandb", args.wandb_project),
    ):
        # a folder that happens to be called wandb (wandb itself leaves one) has a spec, but no origin
        if wanted and getattr(importlib.util.find_spec(package), "origin", None) is None:
            raise InputError(f"{flag} needs the {package} package: pip install {package}")
    if not is_writer:
        return
    for name in ("save", "tensorboard_dir", "wandb_save_dir"):
        if getattr(args, name):
            require_place(_flag(name), getattr(args, name), "metrics.jsonl")
    cache = args.headrank_reference_cache
    # a finished cache is only read, and may lie where nobody writes
    if cache is not None and not os.path.isfile(cache):
        require_place("--headrank-reference-cache", cache)


def require_place(flag: str, path: str, file: str = "") -> None:
    """Refuse a file, or a folder for ``file``, that could not be written; the message names the flag that asked for
    it.
    """
    if not file and os.path.isdir(path):
        raise InputError(f"{flag} {path} is a folder; give the name of a file")
    try:
        require_writable(Path(path) / file)
    except (InputError, OSError) as error:  # OSError: a folder that may not be entered, a name that is too long
        reason = getattr(error.__cause__ or error, "strerror", error)
        raise InputError(
            f"{flag} {path}: cannot be written ({reason}); check the folder and its permissions"
        ) from error


def _refuse(table: Iterable[tuple[bool, str]]) -> None:
    for is_wrong, message in table:
        if is_wrong:
            raise InputError(message)


def _flag(name: str) -> str:
    """The spelling on the command line of an attribute."""
    return f"--{name.replace('_', '-')}"
