"""Convert a Hugging Face model (Qwen3, Llama type, Qwen2) into a Megatron checkpoint, bit for bit.

Writes OUTPUT/release in torch_dist format, which loads at any tensor-parallel size. One process needs memory for one
copy of the weights; torchrun --nproc-per-node N -m headrank import-hf ... divides them over N. --adapter DIR adds a
PEFT adapter of that model (plain LoRA), so that a training of adapters goes on from it: pretrain_headrank.py
--pretrained-checkpoint OUTPUT --headrank-lora-rank ...; the flags are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from headrank.commands import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank import-hf`."""
    parser.add_argument(
        "--hf", required=True, metavar="DIR", help="Hugging Face directory or hub name; 'embedded' is the default model"
    )
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter to go on training, kept beside the weights")
    parser.add_argument(
        "--output", required=True, metavar="CKPT", help="checkpoint root to write (release/ and the tracker file)"
    )
    parser.add_argument(
        "--tensor-model-parallel-size",
        type=options.positive_int,
        default=1,
        metavar="N",
        help="check that the model can be trained at this size; the checkpoint itself loads at any",
    )


def run(args: argparse.Namespace) -> int:
    """Convert and say where the checkpoint is."""
    from headrank.model_config import load_config
    from headrank.reranking.model_sources import resolve_model
    from headrank.reranking.peft_folder import PeftAdapter
    from megatron_patches import device

    source = resolve_model(args.hf)
    load_config(source)  # a wrong name is reported before Megatron is loaded
    from megatron_patches.checkpoints.conversion import import_hf
    from megatron_patches.checkpoints.safetensors_files import local_directory
    from megatron_patches.shape import ModelShape, check_tensor_parallel_size

    adapter = PeftAdapter.read(args.adapter) if args.adapter else None
    shape = ModelShape.from_hf(source)
    check_tensor_parallel_size(shape, args.tensor_model_parallel_size)
    device.initialize()
    with device.process_group_cleanup():
        directory = import_hf(
            local_directory(source),
            args.output,
            adapter=adapter,
            report=_progress if device.is_first_rank() else iter,
        )
        if device.is_first_rank():
            print(f"{directory}: {shape.family}, {shape.layers} layers, {shape.heads} heads in {shape.groups} groups")
            if adapter is not None:
                print(f"its adapter: {adapter.settings().flags}")
    return 0


def _progress(names: list[str]) -> Iterator[str]:
    return options.progress(names, total=len(names), description="import", unit="tensor")
