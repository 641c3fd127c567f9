"""Rehearse a training job without its hardware.

The exact job - real model, loss, DDP and optimizer - runs one step on fake tensors in a fake process group of the real
size, and what it would need is printed per GPU: memory, FLOPs, traffic by collective, the least time a step can
take, hours, and whether it fits. The paper's literal recipe stands beside ours. Nothing is allocated and nothing is downloaded.

  headrank plan --model Qwen3-4B --tensor-model-parallel-size 8 --nodes 1 --gpu h20
  headrank plan --model Qwen3-32B --nodes 128 --gpu h100 --global-batch-size 1024 --queries 1000000 --pairs 430000000
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

from headrank.commands.options import positive_int

if TYPE_CHECKING:
    from megatron_patches.planner import Plan

MODELS = "Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B, embedded, or a Hugging Face directory"
GPU_NUMBERS = {
    "memory_bytes": ("GIB", 2**30, "memory of the GPU"),
    "bf16_flops": ("TFLOPS", 10**12, "dense bfloat16 matrix peak"),
    "fp32_flops": ("TFLOPS", 10**12, "float32 peak"),
    "memory_bandwidth": ("GB/S", 10**9, "memory bandwidth"),
    "link_bandwidth": ("GB/S", 10**9, "link inside a node, one direction"),
    "network_bandwidth": ("GB/S", 10**9, "network between nodes per GPU, one direction"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the job carry their training names."""
    job = parser.add_argument_group("job")
    job.add_argument("--model", metavar="M", required=True, help=MODELS)
    job.add_argument("--tensor-model-parallel-size", type=positive_int, metavar="N", help="default: the smallest that fits")
    job.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="default 1")
    job.add_argument("--gpus-per-node", type=positive_int, default=8, metavar="N", help="default 8")
    job.add_argument("--micro-batch-size", type=positive_int, default=1, metavar="N", help="contexts a forward pass (default 1)")
    job.add_argument("--global-batch-size", type=positive_int, default=32, metavar="N", help="contexts a step (default 32)")
    job.add_argument("--pairs-per-context", type=positive_int, default=16, metavar="N", help="pairs that share a forward (default 16)")
    job.add_argument("--recompute-activations", action="store_true", help="recompute layers in the backward pass")
    job.add_argument("--fp32", action="store_true", help="float32 instead of bfloat16")
    heads = parser.add_argument_group("core heads (default: the paper's for its three models, else eight up to 70%% of the depth)")
    heads.add_argument("--heads", metavar="FILE", help="heads.json")
    heads.add_argument("--l-max", type=int, metavar="N", help="deepest core layer, from 0")
    heads.add_argument("--num-core-heads", type=positive_int, default=8, metavar="K", help="default 8")
    data = parser.add_argument_group("data")
    data.add_argument("--context-documents", type=positive_int, default=100, metavar="N", help="documents a context (default 100)")
    data.add_argument("--document-tokens", type=positive_int, default=80, metavar="N", help="mean tokens a document (default 80)")
    data.add_argument("--queries", type=positive_int, default=211, metavar="N", help="contexts in the training set (default 211)")
    data.add_argument("--pairs", type=positive_int, default=91_000, metavar="N", help="preference pairs in all (default 91000)")
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--gpu", default="h20", metavar="G", help="h20 (default), h100, h800, a100, l40s, mi300x, or custom")
    for name, (unit, _, text) in GPU_NUMBERS.items():
        hardware.add_argument(f"--gpu-{name.replace('_', '-')}", type=float, metavar=unit, help=f"{text}, instead of the GPU's own")
    output = parser.add_argument_group("output")
    output.add_argument("--recipe", choices=["both", "ours", "literal"], default="both", help="which column to compute (default both)")
    output.add_argument("--by-depth", action="store_true", help="measure few layers and extend them: faster, within a percent")
    output.add_argument("--no-limits", action="store_true", help="do not look for what breaks first")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> None:
    """Measure, then print."""
    quieten_megatron()
    from megatron_patches.planner_limits import first_limits, smallest_tensor_parallel

    plans = make_plans(args)
    limits, smallest = [], None
    if not args.no_limits:
        limits = first_limits(plans[0])
        smallest = smallest_tensor_parallel(plans[0])[0]
    if args.json:
        document = {
            "plans": [plan.to_dict() for plan in plans],
            "limits": [vars(limit) for limit in limits],
            "smallest_tensor_parallel": smallest,
        }
        print(json.dumps(document, indent=2))
        return
    print_plans(plans, limits, smallest, is_searched=not args.no_limits)


def quieten_megatron() -> None:
    """Megatron tells at import which fused kernels this machine lacks; the rehearsed one has its own."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")


def make_plans(args: argparse.Namespace) -> list[Plan]:
    """One plan a recipe. The literal recipe is always measured by depth; ours in full unless --by-depth."""
    from headrank.heads import HeadSet
    from megatron_patches.planner import Data, Plan
    from megatron_patches.planner_gpus import find_gpu
    from megatron_patches.planner_job import Job
    from megatron_patches.planner_measure import measure, measure_by_depth
    from megatron_patches.planner_shapes import heads_of, shape_of
    from megatron_patches.shape import check_tensor_parallel_size

    shape = shape_of(args.model)
    if args.heads:
        heads = HeadSet.load(args.heads)
        heads.check_fits(shape.layers, shape.heads, args.model)
    else:
        heads = heads_of(args.model, shape, args.l_max, args.num_core_heads)
    scaled = {
        name: (None if getattr(args, f"gpu_{name}") is None else getattr(args, f"gpu_{name}") * unit)
        for name, (_, unit, _) in GPU_NUMBERS.items()
    }
    gpu, data = find_gpu(args.gpu, **scaled), Data(args.queries, args.pairs)
    job = Job(
        model=args.model,
        shape=shape,
        heads=heads,
        tensor_parallel=args.tensor_model_parallel_size or 1,
        world_size=args.nodes * args.gpus_per_node,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        documents=args.context_documents,
        document_tokens=args.document_tokens,
        pairs_per_context=args.pairs_per_context,
        is_bf16=not args.fp32,
        is_recomputed=args.recompute_activations,
    )
    if args.tensor_model_parallel_size is None:
        job = _with_smallest_size(job, gpu, args.gpus_per_node, data)
    check_tensor_parallel_size(shape, job.tensor_parallel)
    recipes = ["ours", "literal"] if args.recipe == "both" else [args.recipe]
    plans = []
    for recipe in recipes:
        how = measure_by_depth if args.by_depth or recipe == "literal" else measure
        plans.append(Plan(job, recipe, gpu, args.gpus_per_node, data, how(job, recipe)))
    return plans


def _with_smallest_size(job: Any, gpu: Any, gpus_per_node: int, data: Any) -> Any:
    """The job at the smallest tensor-parallel size that fits, or at the largest possible when none does."""
    import dataclasses

    from headrank.errors import InputError
    from megatron_patches.planner import Plan
    from megatron_patches.planner_limits import smallest_tensor_parallel

    size, tried = smallest_tensor_parallel(Plan(job, "ours", gpu, gpus_per_node, data, measured=None))  # type: ignore[arg-type]
    if not tried:
        raise InputError(
            f"--global-batch-size {job.global_batch_size} cannot be split over {job.world_size} GPUs at any tensor-parallel size; "
            f"use a multiple of {job.world_size}"
        )
    return dataclasses.replace(job, tensor_parallel=size or tried[-1].job.tensor_parallel)


def print_plans(plans: list[Plan], limits: list[Any], smallest: int | None, *, is_searched: bool) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    first = plans[0]
    job = first.job
    console = Console(highlight=False)
    console.print(
        f"[bold]{job.model}[/] on {job.world_size} x {first.gpu.name}: TP {job.tensor_parallel} x DP {job.data_parallel}, "
        f"{job.documents} documents a context ({job.sequence_tokens:,} tokens), "
        f"{first.data.num_contexts:,} queries, {first.data.num_pairs:,} pairs"
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("per GPU")
    for plan in plans:
        table.add_column({"ours": "ours", "literal": "the paper's text"}[plan.recipe], justify="right")
    for label, values in _rows(plans):
        table.add_row(label, *values)
    console.print(table)
    if not is_searched:
        return
    console.print(f"smallest tensor-parallel size that fits: {smallest if smallest is not None else 'none; use more or larger GPUs'}")
    for limit in limits:
        last = "" if limit.value is None else f" up to {limit.value:,.0f}"
        console.print(f"first limit, {limit.axis}{last}: {limit.reason}")


def _rows(plans: list[Plan]) -> list[tuple[str, list[str]]]:
    """Label and one cell a plan."""
    facts = [plan.to_dict() for plan in plans]

    def gib(key: str) -> list[str]:
        return [f"{fact[key] / 2**30:.2f} GiB" for fact in facts]

    def seconds(key: str) -> list[str]:
        return [f"{fact[key]:.3g} s" for fact in facts]

    collectives = sorted({name for fact in facts for name in fact["sent_bytes_per_step"]})
    rows = [
        ("layers in memory", [str(fact["layers"]) for fact in facts]),
        ("parameters", [f"{fact['parameters'] / 1e6:,.1f} M" for fact in facts]),
        ("  weights", gib("parameter_bytes")),
        ("  gradients", gib("gradient_bytes")),
        ("  optimizer", gib("optimizer_bytes")),
        ("  reference model", gib("reference_bytes")),
        ("  activations, peak", gib("activation_bytes")),
        ("memory, peak", gib("peak_bytes")),
        ("usable of the GPU", gib("usable_bytes")),
        ("fits", ["yes" if fact["fits"] else "NO" for fact in facts]),
        ("micro-batches a step", [str(fact["microbatches"]) for fact in facts]),
        ("pairs a step", [f"{fact['pairs_per_step']:,}" for fact in facts]),
        ("TFLOP a step", [f"{fact['flops_per_step'] / 1e12:,.1f}" for fact in facts]),
    ]
    rows += [(f"sent, {name}", [f"{fact['sent_bytes_per_step'].get(name, 0) / 1e9:,.2f} GB" for fact in facts]) for name in collectives]
    rows += [
        ("step: compute at peak", seconds("compute_seconds")),
        ("step: memory at peak", seconds("memory_seconds")),
        ("step: network at peak", seconds("network_seconds")),
        ("step: lower bound", [f"{fact['bound_seconds']:.3g} s ({fact['bound_by']})" for fact in facts]),
        ("step: nothing overlapped", seconds("serial_seconds")),
        ("steps an epoch", [f"{fact['steps']:,}" for fact in facts]),
        ("hours an epoch, at least", [f"{fact['hours_at_least']:,.2f}" for fact in facts]),
        ("hours an epoch, nothing overlapped", [f"{fact['hours_serial']:,.2f}" for fact in facts]),
    ]
    return rows
