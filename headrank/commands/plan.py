"""Rehearse a training job without its hardware.

The exact job - real model, loss, DDP and optimizer - runs one step on fake tensors in a fake process group of the real
size, and what it would need is printed per GPU: memory, FLOPs, traffic by collective, the least time a step can take,
hours, and whether it fits. The paper's literal recipe stands beside ours. Nothing is allocated and nothing is
downloaded. Our column builds every layer; the paper's, and what the limits need, extend a few of them, which are all
alike.

  headrank plan --model Qwen3-4B --tensor-model-parallel-size 8 --nodes 1 --gpu h20
  headrank plan --model Qwen3-32B --nodes 128 --gpu h100 --global-batch-size 1024 --queries 1000000 --pairs 430000000
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from headrank.errors import InputError

if TYPE_CHECKING:
    from megatron_patches.planner.job import Job
    from megatron_patches.planner.limits import Limit
    from megatron_patches.planner.plan import Plan

MODELS = "Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B, Qwen3-30B-A3B, embedded, or a Hugging Face directory"
PAPER_BATCH = 32
COLUMNS = {"ours": "ours", "literal": "the paper's text"}
# field of a GPU -> option (planner_gpus.flag_of), unit, its size, what it is
GPU_NUMBERS = {
    "memory_bytes": ("--gpu-memory", "GIB", 2**30, "memory of the GPU"),
    "bf16_flops": ("--gpu-bf16", "TFLOPS", 10**12, "dense bfloat16 matrix peak"),
    "fp32_flops": ("--gpu-fp32", "TFLOPS", 10**12, "float32 peak"),
    "memory_bandwidth": ("--gpu-memory-bandwidth", "GB/S", 10**9, "memory bandwidth"),
    "link_bandwidth": ("--gpu-link-bandwidth", "GB/S", 10**9, "link inside a node, one direction"),
    "network_bandwidth": ("--gpu-network-bandwidth", "GB/S", 10**9, "network between nodes per GPU, one direction"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the job carry their training names."""
    parser.usage = "headrank plan --model M [options]"
    job = parser.add_argument_group("job")
    job.add_argument("--model", metavar="M", required=True, help=MODELS)
    _add_count(job, "--tensor-model-parallel-size", None, "default: the smallest that fits")
    _add_count(job, "--expert-model-parallel-size", 1, "ranks that share the experts of a layer (default 1)")
    _add_count(job, "--nodes", 1, "default 1")
    _add_count(job, "--gpus-per-node", 8, "default 8")
    _add_count(job, "--micro-batch-size", 1, "contexts per forward pass (default 1)")
    _add_count(
        job,
        "--global-batch-size",
        None,
        f"contexts per step (default {PAPER_BATCH}, or the next number that the ranks can share)",
    )
    _add_count(job, "--pairs-per-context", 16, "pairs that share a forward (default 16)")
    job.add_argument("--recompute-granularity", choices=["full"], help="recompute whole layers in the backward pass")
    job.add_argument(
        "--sequence-parallel", action="store_true", help="split what lies between layers over the tensor-parallel ranks"
    )
    _add_count(
        job,
        "--lora-rank",
        None,
        "train adapters of this rank; the base model is frozen (default: all weights are trained)",
    )
    job.add_argument("--fp32", action="store_true", help="float32 instead of bfloat16")
    heads = parser.add_argument_group(
        "core heads (default: the paper's for its three models, else eight up to 70% of the depth)"
    )
    heads.add_argument(
        "--heads",
        metavar="FILE",
        help="heads.json; a readout of the late layout plans its training on a teacher's labels",
    )
    heads.add_argument("--l-max", type=int, metavar="N", help="deepest core layer, from 0")
    _add_count(heads, "--num-core-heads", 8, "default 8")
    data = parser.add_argument_group("data")
    _add_count(data, "--context-documents", 100, "documents per context (default 100)")
    _add_count(data, "--document-tokens", 80, "mean tokens per document (default 80)")
    _add_count(data, "--queries", 211, "contexts in the training set (default 211)")
    _add_count(data, "--pairs", 91_000, "preference pairs in all (default 91000)")
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument(
        "--gpu", default="h20", metavar="G", help="h20 (default), h100, h800, a100, l40s, mi300x, or custom"
    )
    for name, (flag, unit, _, text) in GPU_NUMBERS.items():
        hardware.add_argument(flag, dest=name, type=float, metavar=unit, help=f"{text}, instead of the GPU's own")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--recipe", choices=["both", "ours", "literal"], default="both", help="which column to compute (default both)"
    )
    output.add_argument(
        "--by-depth", action="store_true", help="extend few layers in our column too: faster, within two percent"
    )
    output.add_argument("--no-limits", action="store_true", help="do not look for what breaks first")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_count(group: Any, flag: str, default: int | None, text: str) -> None:
    """A whole number of at least one."""
    group.add_argument(flag, type=partial(_count, flag), default=default, metavar="N", help=text)


def _count(flag: str, text: str) -> int:
    """The number, or the one line that says what is wrong with it."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InputError(f"{flag} {text} is not a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Measure, then print."""
    # the rehearsal counts on stand-ins for tensors, with the CPU's kernels, wherever it runs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quieten_megatron()
    from megatron_patches.planner.limits import first_limits, smallest_tensor_parallel

    plans = make_plans(args)
    limits, smallest = [], None
    if not args.no_limits:
        limits = first_limits(plans[0])
        smallest = smallest_tensor_parallel(plans[0], is_batch_free=args.global_batch_size is None)
    if args.json:
        document = {
            "plans": [plan.to_dict() for plan in plans],
            "limits": [vars(limit) for limit in limits],
            "smallest_tensor_parallel": smallest,
        }
        print(json.dumps(document, indent=2))
        return
    print_plans(plans)
    if not args.no_limits:
        print_limits(COLUMNS[plans[0].recipe], limits, smallest)
    print("Times are lower bounds from published peaks; nothing was measured on a GPU.")


def quieten_megatron() -> None:
    """Megatron tells at import which fused kernels this machine lacks; the rehearsed one has its own."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")


def make_plans(args: argparse.Namespace) -> list[Plan]:
    """One plan a recipe. The literal recipe is measured by depth; ours in full unless --by-depth."""
    from megatron_patches.planner.gpus import find_gpu
    from megatron_patches.planner.limits import smallest_tensor_parallel
    from megatron_patches.planner.measure import measure, measure_by_depth
    from megatron_patches.planner.plan import Data, Plan

    numbers = {name: getattr(args, name) for name in GPU_NUMBERS}
    gpu = find_gpu(
        args.gpu, **{name: None if value is None else value * GPU_NUMBERS[name][2] for name, value in numbers.items()}
    )
    data, job = Data(args.queries, args.pairs), _job(args)
    if not job.is_late and args.pairs < args.queries:
        raise InputError(f"--pairs {args.pairs} is fewer than one for each of --queries {args.queries}")
    job.config()  # contradictions are refused before anything is built
    if job.is_late and args.recipe == "literal":
        raise InputError(
            "--recipe literal is the paper's prompt; --heads is a readout of the late layout: leave --recipe out"
        )
    recipes = (
        ["ours", "literal"] if args.recipe == "both" and not job.is_late else [args.recipe.replace("both", "ours")]
    )
    if args.tensor_model_parallel_size is None:
        largest = Plan(job, recipes[0], gpu, args.gpus_per_node, data, measure_by_depth(job, recipes[0]))
        is_batch_free = args.global_batch_size is None
        size = smallest_tensor_parallel(largest, is_batch_free=is_batch_free) or job.tensor_parallel
        job = job.with_tensor_parallel(size, is_batch_free=is_batch_free)
    plans = []
    for recipe in recipes:
        how = measure_by_depth if args.by_depth or recipe == "literal" else measure
        plans.append(Plan(job, recipe, gpu, args.gpus_per_node, data, how(job, recipe)))
    return plans


def _job(args: argparse.Namespace) -> Job:
    """The job that the flags describe, at the largest tensor-parallel size possible and with a global batch where
    none was given.
    """
    from headrank.method.heads import HeadSet
    from megatron_patches.planner.job import Job
    from megatron_patches.planner.shapes import heads_of, shape_of

    shape = shape_of(args.model)
    if args.heads and args.l_max is not None:
        raise InputError("--heads and --l-max contradict each other; give one")
    heads = HeadSet.load(args.heads) if args.heads else heads_of(args.model, shape, args.l_max, args.num_core_heads)
    heads.check_fits(shape.layers, shape.heads, args.model)
    job = Job(
        model=args.model,
        shape=shape,
        heads=heads,
        world_size=args.nodes * args.gpus_per_node,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or PAPER_BATCH,
        documents=args.context_documents,
        document_tokens=args.document_tokens,
        pairs_per_context=args.pairs_per_context,
        is_bf16=not args.fp32,
        is_recomputed=args.recompute_granularity == "full",
        is_sequence_parallel=args.sequence_parallel,
        lora_rank=args.lora_rank or 0,
        expert_parallel=args.expert_model_parallel_size,
    )
    if not job.is_late and job.sequence_tokens > shape.max_positions:
        raise InputError(
            f"--context-documents {job.documents} x --document-tokens {job.document_tokens} make "
            f"{job.sequence_tokens:,} tokens, but "
            f"{args.model} has {shape.max_positions:,} positions; lower one of them"
        )
    is_batch_free = args.global_batch_size is None
    if args.tensor_model_parallel_size is not None:
        if job.world_size % args.tensor_model_parallel_size:
            raise InputError(
                f"--tensor-model-parallel-size {args.tensor_model_parallel_size} does not divide the "
                f"{job.world_size} GPUs of "
                f"--nodes {args.nodes} x --gpus-per-node {args.gpus_per_node}"
            )
        return job.with_tensor_parallel(args.tensor_model_parallel_size, is_batch_free=is_batch_free)
    possible = job.possible_sizes(is_batch_free=is_batch_free)
    if not possible:
        raise InputError(
            f"--global-batch-size {job.global_batch_size} cannot be split over {job.world_size} GPUs at any "
            "tensor-parallel size; "
            f"use a multiple of {job.world_size}"
        )
    return possible[-1]


def print_plans(plans: list[Plan]) -> None:
    """The job in a line and a table for people."""
    from rich.console import Console
    from rich.table import Table

    first = plans[0]
    job = first.job
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{job.model}[/] on {job.world_size:,} x {first.gpu.name}: TP {job.tensor_parallel} x DP "
        f"{job.data_parallel}, "
        f"global batch {job.global_batch_size:,}, {job.documents} documents per context ({job.sequence_tokens:,} "
        "tokens), "
        + (
            f"{first.data.num_contexts:,} lists"
            if job.is_late
            else f"{first.data.num_contexts:,} queries, {first.data.num_pairs:,} pairs"
        )
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("per GPU")
    for plan in plans:
        table.add_column(COLUMNS[plan.recipe], justify="right")
    for label, values in _rows(plans):
        table.add_row(label, *values)
    console.print(table)


def print_limits(name: str, limits: list[Limit], smallest: int | None) -> None:
    """What breaks first, a line each."""
    print(
        f"smallest tensor-parallel size that fits, {name}: "
        f"{smallest if smallest is not None else 'none; use more or larger GPUs'}"
    )
    for limit in limits:
        last = "" if limit.value is None else f" up to {limit.value:,.0f}"
        print(f"first limit, {limit.axis}{last}: {limit.reason}")


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
        ("pairs per step", [f"{fact['pairs_per_step']:,}" for fact in facts]),
        ("TFLOP per step", [f"{fact['flops_per_step'] / 1e12:,.1f}" for fact in facts]),
    ]
    rows.append(("sent per step", [f"{sum(fact['sent_bytes_per_step'].values()) / 1e9:,.3g} GB" for fact in facts]))
    rows += [
        (f"  {name}", [f"{fact['sent_bytes_per_step'].get(name, 0) / 1e9:,.3g} GB" for fact in facts])
        for name in collectives
    ]
    rows += [
        ("step: compute at peak", seconds("compute_seconds")),
        ("step: memory at peak", seconds("memory_seconds")),
        ("step: network at peak", seconds("network_seconds")),
        ("step: lower bound", [f"{fact['bound_seconds']:.3g} s ({fact['bound_by']})" for fact in facts]),
        ("step: nothing overlapped", seconds("serial_seconds")),
        ("steps an epoch", [f"{fact['steps']:,}" for fact in facts]),
        ("hours an epoch, at least", [f"{fact['hours_at_least']:,.3g}" for fact in facts]),
        ("hours an epoch, nothing overlapped", [f"{fact['hours_serial']:,.3g}" for fact in facts]),
        ("on disk: tokenised contexts", [f"{fact['store_bytes'] / 1e9:,.3g} GB" for fact in facts]),
        ("on disk: reference scores", [f"{fact['reference_store_bytes'] / 1e9:,.3g} GB" for fact in facts]),
    ]
    return rows
