"""The command line of pretrain_headrank.py: Megatron's flags and --headrank-*. Nothing here imports torch: --help
answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrank.errors import OneLineParser
from megatron_patches.training.headrank_flags import HEADRANK_FLAGS
from megatron_patches.training.megatron_flags import MEGATRON_FLAGS


def build_parser() -> OneLineParser:
    """All flags, grouped as Megatron groups them, ours in one group at the end."""
    parser = OneLineParser(
        prog="pretrain_headrank.py",
        description="Preference training of core attention heads on Megatron-Core. Flags without 'headrank' are "
        "Megatron's own.",
        epilog="example: torchrun --nproc-per-node 8 pretrain_headrank.py --tensor-model-parallel-size 4 "
        "--headrank-model Qwen3-0.6B "
        "--headrank-heads heads.json --train-data-path train --global-batch-size 32 --lr 1e-5 --clip-grad 5.0 "
        "--bf16 --save run",
        allow_abbrev=False,
    )
    for title, flags in MEGATRON_FLAGS.items():
        group = parser.add_argument_group(title)
        for name, options in flags:
            group.add_argument(name, **options)
    ours = parser.add_argument_group("headrank")
    for name, options in HEADRANK_FLAGS:
        ours.add_argument(name, **options)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an unknown flag or value is one line and exit code 2."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # most often the shape flags of a Megatron launcher
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)} (layers, sizes and rotary settings are read from "
            "--headrank-model)"
        )
    return args
