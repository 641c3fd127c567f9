"""Convert a Megatron checkpoint into a Hugging Face directory with headrank.json and a model card.

Adapters are merged into the weights; --adapter-only writes them alone, as a PEFT folder of a few megabytes.

A full export takes the layers that were not trained from the base model and loads with plain AutoModelForCausalLM;
--truncate writes only the layers that reranking reads. Both load with HeadRankReranker. The checkpoint may have been
written at any tensor-parallel size. torchrun --nproc-per-node N -m headrank export-hf ... writes the files of a sharded
model in parallel. --exported DIR --heads FILE writes an exported model again with other heads: nothing is converted,
the weights are copied.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands import options
from headrank.errors import InputError
from headrank.reranking.model_sources import resolve_model

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank export-hf`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", metavar="CKPT", help="checkpoint root (its latest iteration) or one iter_NNNNNNN directory"
    )
    source.add_argument(
        "--exported", metavar="DIR", help="directory that export-hf wrote before; copied, with the heads of --heads"
    )
    parser.add_argument(
        "--base", required=True, metavar="HF", help="the model that was trained: directory, hub name or 'embedded'"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="directory to write; appears only when it is complete"
    )
    parser.add_argument("--heads", metavar="FILE", help="heads.json (default: the heads stored with the source)")
    parser.add_argument(
        "--truncate", action="store_true", help="leave out every layer above the deepest head, and the output layer"
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="write the trained adapter as a PEFT folder, without the base's weights",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest safetensors file (default 5GB)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (default: the base model's)"
    )
    parser.add_argument(
        "--name", metavar="REPO", help="name in the model card, such as org/model (default: the output's name)"
    )
    parser.add_argument(
        "--base-name", metavar="REPO", help="name of the base model in the model card (default: from --base)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output directory")


def run(args: argparse.Namespace) -> int:
    """Export and say what was written."""
    from headrank.method.heads import HeadSet
    from headrank.model_config import load_config

    heads = HeadSet.load(args.heads) if args.heads else None
    source = resolve_model(args.base)
    load_config(source)
    if args.exported:
        return _replace_heads(args, heads, Path(source))
    if args.adapter_only and (args.truncate or args.max_shard_size):
        flag = "--truncate" if args.truncate else "--max-shard-size"
        raise InputError(
            f"--adapter-only writes no weights of the base, so {flag} has no meaning with it; leave one out"
        )
    import torch

    from megatron_patches import device
    from megatron_patches.checkpoints.export import ExportRequest, export_hf
    from megatron_patches.checkpoints.safetensors_files import local_directory, parse_size

    base = local_directory(source)
    request = ExportRequest(
        checkpoint=Path(args.checkpoint),
        base=base,
        output=Path(args.output),
        base_name=args.base_name or _base_name(args.base, base),
        name=args.name or Path(args.output).absolute().name,
        heads=heads,
        is_truncated=args.truncate,
        is_adapter_only=args.adapter_only,
        loadable_base=str(base.absolute()) if Path(args.base).is_dir() else args.base,
        max_shard_size=parse_size(args.max_shard_size or "5GB"),
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        can_overwrite=args.overwrite,
    )
    device.initialize()
    with device.process_group_cleanup():
        used = export_hf(request, report=_progress if device.is_first_rank() else iter)
        if device.is_first_rank():
            print(_summary(request.output, used, args.truncate, args.adapter_only))
    return 0


def _replace_heads(args: argparse.Namespace, heads: HeadSet | None, base: Path) -> int:
    """The way without Megatron: the first process alone copies."""
    from headrank.reranking.exported_model import replace_heads

    for flag, value in (
        ("--truncate", args.truncate),
        ("--adapter-only", args.adapter_only),
        ("--dtype", args.dtype),
        ("--max-shard-size", args.max_shard_size),
    ):
        if value:
            raise InputError(
                f"--exported copies the weights as they are, so {flag} has no meaning with it; give --checkpoint"
            )
    if int(os.environ.get("RANK", "0")) == 0:
        output = Path(args.output)
        used = replace_heads(
            Path(args.exported),
            heads,
            output,
            name=args.name or output.absolute().name,
            base=base,
            base_name=args.base_name or _base_name(args.base, base),
            can_overwrite=args.overwrite,
        )
        print(f"{output}: the weights of {args.exported}, {len(used.heads)} heads")
    return 0


def _summary(output: Path, heads: HeadSet | None, is_truncated: bool, is_adapter_only: bool) -> str:
    if is_adapter_only:
        return f"{output}: adapter{'' if heads is None else f', {len(heads.heads)} heads'}"
    if heads is None:
        return f"{output}: full model; no heads were given or stored, so it has no headrank.json (--heads adds it)"
    depth = f"layers 0-{heads.l_max} of {heads.num_layers}" if is_truncated else f"all {heads.num_layers} layers"
    return f"{output}: {depth}, {len(heads.heads)} heads"


def _base_name(given: str, directory: Path) -> str:
    """The hub's name where one was given; a local directory's own name otherwise."""
    if given == "embedded":
        return "HuggingFaceTB/SmolLM2-135M-Instruct"
    return directory.absolute().name if Path(given).is_dir() else given


def _progress(names: list[str]) -> Iterator[str]:
    return options.progress(names, total=len(names), description="export", unit="tensor")
