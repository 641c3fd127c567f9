"""The same run in Megatron-LM's own trainer: model provider, data provider and forward step through
megatron.training.pretrain().

For what our loop does not have: straggler detection, fault tolerance, asynchronous saving, Megatron's profiler. The
wheel of Megatron-Core has brought megatron.training since 0.17, for Python 3.12. Losses are those of our loop. What is
Megatron's here: its log, its checkpoints (export them with ``headrank export-hf --heads``), its decision what a step
that is not finite means.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from headrank.errors import InputError
from headrank.method.heads import HeadSet
from megatron_patches import device
from megatron_patches.checkpoints.files import complete_iterations
from megatron_patches.model import HeadRankModel
from megatron_patches.shape import ModelShape
from megatron_patches.training.assembly import build_policy, data_parallel_rank
from megatron_patches.training.batches import Batch, length_multiple, training_batches
from megatron_patches.training.config import TrainingConfig
from megatron_patches.training.data_setup import open_training_data
from megatron_patches.training.late_batches import LateBatch
from megatron_patches.training.run_setup import announce, prepare_reference
from megatron_patches.training.train_step import TERMS, batch_loss, score_batch
from megatron_patches.training.training_log import LINE_NAMES
from megatron_patches.versions import has_training, run_pretrain


def check_megatron_trainer(config: TrainingConfig) -> None:
    """Refuse what Megatron's trainer does not know how to do with this model."""
    if not has_training():
        raise InputError(
            "--headrank-trainer megatron: this Megatron-Core brings no megatron.training; its wheels from 0.17 on "
            "do, for Python 3.12"
        )
    for flag, is_given in (
        ("--valid-data-path", config.valid_data is not None),
        ("--exit-interval", config.exit_interval is not None and config.save is None),
        ("--finetune", config.finetune),
        ("--profile", config.profile),
        ("--expert-model-parallel-size", config.expert_parallel > 1),
    ):
        if is_given:
            raise InputError(
                f"{flag} is our loop's; with --headrank-trainer megatron give Megatron's own in "
                "--headrank-megatron-flags"
            )
    if config.train_iters is None:
        raise InputError(
            "--headrank-trainer megatron needs the length of the run before it reads the data; add --train-iters"
        )


def train_with_megatron(config: TrainingConfig, shape: ModelShape, heads: HeadSet) -> None:
    """Hand everything over; returns when Megatron does."""
    from megatron.core.enums import ModelType

    # Megatron finds the groups made, and makes none of its own; where it sees no GPU it would make none at all
    device.initialize(config.tensor_parallel, seed=config.seed, timeout_minutes=config.distributed_timeout_minutes)

    trained = _Providers(config, shape, heads)
    sys.argv = [sys.argv[0], *megatron_flags(config, shape), *shlex.split(config.megatron_flags or "")]
    with device.trainer_without_cuda():
        run_pretrain(trained.data, trained.model, ModelType.encoder_or_decoder, trained.forward_step)


def megatron_flags(config: TrainingConfig, shape: ModelShape) -> list[str]:
    """The command line of Megatron's trainer for this run. Sizes are for its checks and its FLOP count; the model is
    ours.
    """
    schedule = config.schedule
    values = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": shape.ffn,
        "--num-attention-heads": shape.heads,
        "--num-query-groups": shape.groups,
        "--kv-channels": shape.head_dim,
        "--max-position-embeddings": shape.max_positions,
        "--seq-length": config.seq_length or shape.max_positions,
        "--vocab-size": shape.vocab,
        "--tokenizer-type": "NullTokenizer",
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--transformer-impl": "local" if config.transformer_impl != "transformer_engine" else "transformer_engine",
        "--dataloader-type": "external",
        "--tensor-model-parallel-size": config.tensor_parallel,
        "--micro-batch-size": config.micro_batch_size,
        "--global-batch-size": config.global_batch_size,
        "--train-iters": config.train_iters,
        "--lr": schedule.lr,
        "--min-lr": schedule.min_lr,
        "--lr-decay-style": schedule.lr_decay_style,
        "--lr-decay-iters": schedule.lr_decay_iters,
        "--lr-warmup-iters": None if schedule.lr_warmup_fraction is not None else schedule.lr_warmup_iters,
        "--lr-warmup-fraction": schedule.lr_warmup_fraction,
        "--lr-warmup-init": schedule.lr_warmup_init,
        "--weight-decay": schedule.weight_decay,
        "--clip-grad": schedule.clip_grad,
        "--adam-beta1": schedule.adam_beta1,
        "--adam-beta2": schedule.adam_beta2,
        "--adam-eps": schedule.adam_eps,
        "--seed": config.seed,
        "--distributed-backend": "nccl" if device.has_cuda() else "gloo",
        "--distributed-timeout-minutes": config.distributed_timeout_minutes,
        "--log-interval": config.log_interval,
        "--eval-iters": 0,
        "--eval-interval": config.train_iters,
        "--save": config.save,
        "--save-interval": config.save_interval or config.train_iters if config.save else None,
        "--load": config.save if config.save and complete_iterations(config.save) else config.load,
        "--exit-interval": config.exit_interval,
        "--exit-duration-in-mins": config.exit_duration_in_mins,
        "--tensorboard-dir": config.tensorboard_dir,
        "--ckpt-format": "torch_dist",
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--timing-log-level": config.timing_log_level,
    }
    switches = {
        "--bf16": config.bf16,
        "--accumulate-allreduce-grads-in-fp32": config.bf16,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": True,  # our model has no output layer whose gradient would be added
        "--no-rope-fusion": True,
        "--no-gradient-accumulation-fusion": not config.gradient_accumulation_fusion or not device.has_cuda(),
        "--no-persist-layer-norm": True,
        "--sequence-parallel": config.sequence_parallel,
        "--use-distributed-optimizer": config.use_distributed_optimizer,
        "--overlap-grad-reduce": config.overlap_grad_reduce,
        "--overlap-param-gather": config.overlap_param_gather,
        "--exit-signal-handler": config.exit_signal_handler,
        "--deterministic-mode": config.deterministic_mode,
        "--log-throughput": config.log_throughput,
        "--no-load-optim": not config.load_optimizer,
        "--no-save-optim": not config.save_optimizer,
    }
    given = [str(part) for flag, value in values.items() if value is not None for part in (flag, value)]
    return [*given, *(flag for flag, is_on in switches.items() if is_on)]


class _Providers:
    """What Megatron asks for, in its order: the model, then the data, then one forward step after the other."""

    def __init__(self, config: TrainingConfig, shape: ModelShape, heads: HeadSet) -> None:
        self.config, self.shape, self.heads = config, shape, heads
        self._reference: Any = None
        self._lists: Any = None
        self._multiple = 1

    def model(self, *_: Any, **__: Any) -> HeadRankModel:
        """The truncated model with its start weights; the reference's scores are completed with them. Collective."""
        self._lists = open_training_data(self.config, self.shape, self.heads)
        announce(self.config, self.shape, self.heads, self._lists, 0)
        policy = build_policy(self.config, self.shape, self.heads)
        policy.config.hetereogenous_dist_checkpoint = True  # Megatron's spelling: the last layer is not like the others
        self._reference = prepare_reference(self.config, self.heads, self._lists, policy, is_resuming=False)
        self._multiple = length_multiple(policy.config)
        return policy

    def data(self, *_: Any, **__: Any) -> tuple[Iterator[Batch | LateBatch], None, None]:
        """Micro-batches of this data-parallel rank, from the first sample that no earlier run has seen."""
        from megatron.training import get_args

        batches = training_batches(
            self._lists,
            self._reference,
            start=get_args().consumed_train_samples,
            rank=data_parallel_rank(),
            world_size=self.config.data_parallel,
            micro_batch_size=self.config.micro_batch_size,
            where=device.device(),
            multiple_of=self._multiple,
        )
        return batches, None, None

    data.is_distributed = True  # type: ignore[attr-defined]  # every rank of a tensor-parallel group reads its own copy

    def forward_step(self, batches: Iterator[Any], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Any]:
        """Megatron's protocol; ``batches`` is its own wrapper of ours."""
        batch = next(batches)
        scores = score_batch(model, batch, self.heads, is_in_batch=self.config.loss.in_batch_weight > 0)
        return scores, partial(self._loss, batch=batch)

    def _loss(
        self, scores_BN: torch.Tensor, *, batch: Batch | LateBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and, under the names of our log line, [sum, 1] of every term: Megatron adds both up over all
        ranks and divides.
        """
        total, values = batch_loss(scores_BN, batch, self.config.loss)
        one = values.new_ones(())
        return total, {LINE_NAMES[name]: torch.stack([value, one]) for name, value in zip(TERMS, values, strict=True)}
