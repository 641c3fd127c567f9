"""Preference training of core attention heads on Megatron-Core: parse, build, train.

    torchrun --nproc-per-node 8 pretrain_headrank.py --tensor-model-parallel-size 4 --headrank-model Qwen3-0.6B \\
        --headrank-heads heads.json --train-data-path train --global-batch-size 32 --lr 1e-5 \\
        --clip-grad 5.0 --bf16 --save run

Started again with the same arguments it goes on from the last good checkpoint in --save. Plain ``python`` is a world of
one.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

from headrank.errors import InputError
from megatron_patches.training.arguments import build_parser, parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run; a user's error is one line on stderr (of rank 0) and exit code 2."""
    args = parse_arguments(argv)
    for category in (UserWarning, FutureWarning):  # what is not installed, what torch renamed: once per module and rank
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")
    from megatron_patches import device

    try:
        with device.process_group_cleanup():
            return run(args)
    except InputError as error:
        if _is_rank_zero():
            sys.stderr.write(f"pretrain_headrank.py: {build_parser().in_flags(str(error))}\n")
        return 2


def _is_rank_zero() -> bool:
    """Whether this process tells the user: rank 0, and every process that does not know its rank."""
    from megatron_patches import device

    try:
        return device.world_from_environment()[0] == 0
    except InputError:
        return True


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked cheaply, then build and train."""
    started = time.monotonic()
    from megatron_patches import device
    from megatron_patches.kernels import prepare_kernels, start_overlap
    from megatron_patches.layer_spec import has_transformer_engine
    from megatron_patches.shape import ModelShape
    from megatron_patches.training.config import check_heads, config_from, with_readout
    from megatron_patches.training.config_checks import check_machine, check_outputs
    from megatron_patches.training.loop import train
    from megatron_patches.training.run_setup import load_heads, prepare_run, with_local_model
    from megatron_patches.training.training_log import set_up_logging

    rank, world_size, _ = device.world_from_environment()
    set_up_logging(rank)
    config = config_from(args, world_size)
    check_machine(args, has_cuda=device.has_cuda(), has_transformer_engine=has_transformer_engine())
    config = with_local_model(config)
    shape = ModelShape.from_hf(config.model)
    heads = load_heads(config, shape)
    check_heads(heads, shape, config)
    config = with_readout(config, heads)
    check_outputs(args, is_writer=rank == 0)
    prepare_kernels(config)
    if config.trainer == "megatron":
        from megatron_patches.training.megatron_trainer import check_megatron_trainer, train_with_megatron

        check_megatron_trainer(config)
        train_with_megatron(config, shape, heads)
        return 0
    device.initialize(
        config.tensor_parallel,
        expert_model_parallel_size=config.expert_parallel,
        seed=config.seed,
        timeout_minutes=config.distributed_timeout_minutes,
    )
    device.keep_freed_memory()
    if config.tp_comm_overlap:
        start_overlap(config, shape.hidden)
    prepared, batches = prepare_run(config, shape, heads)
    is_complete = train(prepared, batches, started)
    prepared.finish(is_complete)
    return 0


if __name__ == "__main__":  # Megatron's checkpoint writers import this file again in spawned processes
    sys.exit(main())
