"""What test_planner.py runs in processes of its own: the planner's predictions, and the same job for real."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from headrank.commands import main
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from megatron_patches import device
from megatron_patches.parallel_scores import core_head_scores
from megatron_patches.planner.job import CALIBRATION_TOKENS, QUERY_TOKENS, Job
from megatron_patches.planner.measure import Measurement, measure, measure_by_depth
from megatron_patches.planner.recipes import build_full_model, one_pass_batch, two_pass_batch, two_pass_scores
from megatron_patches.planner.shapes import heads_of, shape_of
from megatron_patches.shape import ModelShape
from megatron_patches.training.assembly import build_optimizer, build_policy, wrap_model
from megatron_patches.training.train_step import train_step

# Large enough that weights and activations stand out of the noise of a process, small enough for a second a step.
TINY = ModelShape(
    family="qwen3",
    layers=6,
    hidden=256,
    ffn=768,
    heads=8,
    groups=4,
    head_dim=32,
    vocab=96_000,
    rotary_base=1e6,
    eps=1e-6,
    is_tied=True,
    has_qk_norm=True,
    has_qkv_bias=False,
    max_positions=8192,
)


def cpu_job(name: str, tensor_parallel: int) -> Job:
    """A job that this machine can hold, in float32 and with the CPU's kernels."""
    shape = TINY if name == "tiny" else shape_of(name)
    documents, tokens = (20, 100) if name == "tiny" else (20, 30)
    return Job(
        name,
        shape,
        heads_of(name, shape, last_layer=4 if name == "tiny" else 7),
        tensor_parallel,
        tensor_parallel,
        global_batch_size=1,
        documents=documents,
        document_tokens=tokens,
        is_bf16=False,
        has_gpu_kernels=False,
    )


def late_job(job: Job) -> Job:
    """The same lengths in the late layout, all heads weighted alike."""
    readout = Readout(weights=(1.0,) * len(job.heads.heads))
    heads = dataclasses.replace(job.heads, prompt=PromptTemplate(document_layout="late"), readout=readout)
    return dataclasses.replace(job, heads=heads)


def numbers(measured: Measurement) -> dict[str, Any]:
    """A measurement as plain numbers."""
    values = {field.name: getattr(measured, field.name) for field in dataclasses.fields(measured)}
    for phase in ("microbatch", "update"):
        costs = values.pop(phase)
        values[f"{phase}_flops"] = costs.flops
        values[f"{phase}_traffic"] = costs.traffic_bytes
        values[f"{phase}_kernels"] = costs.num_kernels
        values[f"{phase}_waits"] = costs.waits
        values[f"{phase}_messages"] = {tuple(message): count for message, count in costs.messages.items()}
    return values


def predict(jobs: list[tuple[Job, str, bool]]) -> list[dict[str, Any]]:
    """The planner's numbers of each (job, recipe, in full or by depth)."""
    return [
        numbers(measure(job, recipe) if is_full else measure_by_depth(job, recipe)) for job, recipe, is_full in jobs
    ]


def with_grouped_float32(job: Job) -> int:
    """Activations of a job as if its GPU had an attention kernel for float32 that knows groups."""
    with mock.patch("megatron_patches.planner.world._lacks_grouped_kernel", lambda query, *, has_mask: has_mask):
        return measure.__wrapped__(job).activation_bytes


def command(commands: list[tuple[str, ...]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each 'headrank plan ...'."""
    outcomes = []
    for arguments in commands:
        with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as said:
            code = main(["plan", *arguments])
        outcomes.append((code, said.getvalue(), errors.getvalue()))
    return outcomes


def regenerate(names: list[str]) -> dict[str, str]:
    """Tables of docs/scaling.md, made anew."""
    from docs.scaling_tables import TABLES

    return {name: TABLES[name]() for name in names}


def _return_freed_memory_at_once() -> None:
    """Let resident memory follow live tensors; a fork is too late for glibc's environment variables."""
    libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
    assert libc.mallopt(mmap_threshold, 65536) and libc.mallopt(trim_threshold, 65536)


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _batches(job: Job) -> Iterator[Any]:
    while True:
        yield one_pass_batch(job)


def _prepare(job: Job) -> tuple[Any, Any, Any]:
    """The job's model with all its pages touched, and its optimizer."""
    config = job.config()
    policy = build_policy(config, job.shape, job.heads)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(0, 0.02)
    model = wrap_model(config, policy)
    optimizer, _ = build_optimizer(config, model)
    return config, model, optimizer


def spend(job: Job) -> dict[str, int]:
    """Growth of this process's memory: what a job keeps, and how far a step rises above that."""
    _return_freed_memory_at_once()
    device.initialize(job.tensor_parallel)
    small = dataclasses.replace(job.shape, layers=3, hidden=64, ffn=48, vocab=96)
    rehearsal = dataclasses.replace(job, shape=small, heads=heads_of("small", small, last_layer=2), documents=2)
    config, model, optimizer = _prepare(rehearsal)  # libraries take their own memory at their first use, before we look
    train_step(model, optimizer, _batches(rehearsal), rehearsal.heads, config.loss, 1)
    del config, model, optimizer
    before = _status("VmRSS")
    config, model, optimizer = _prepare(job)
    train_step(model, optimizer, _batches(job), job.heads, config.loss, 1)
    ctypes.CDLL(None).malloc_trim(0)
    kept = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # forget the highest resident size so far
    train_step(model, optimizer, _batches(job), job.heads, config.loss, 1)
    device.shutdown()
    return {"lasting": kept - before, "activations": _status("VmHWM") - kept}


def score_both_ways(job: Job) -> tuple[list[float], list[float]]:
    """The same weights and documents scored by ours in one pass and by the paper's text in two."""
    device.initialize(job.tensor_parallel)
    model = build_full_model(job.config(), job.shape)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    ours, (query, calibration) = one_pass_batch(job), two_pass_batch(job)
    prefix = torch.randint(0, job.shape.vocab, (1, job.prefix_tokens), generator=torch.Generator().manual_seed(7))
    branches = torch.randint(
        0, job.shape.vocab, (1, QUERY_TOKENS + CALIBRATION_TOKENS), generator=torch.Generator().manual_seed(8)
    )
    ours = dataclasses.replace(ours, input_ids_BS=torch.cat([prefix, branches], dim=1))
    query = dataclasses.replace(query, input_ids_BS=torch.cat([prefix, branches[:, :QUERY_TOKENS]], dim=1))
    calibration = dataclasses.replace(calibration, input_ids_BS=torch.cat([prefix, branches[:, QUERY_TOKENS:]], dim=1))
    with torch.no_grad():
        one = core_head_scores(model(ours.input_ids_BS, ours.layout, job.heads.by_layer()), ours.layout)
        two = two_pass_scores(model, query, calibration, job.heads, job.shape.layers)
    device.shutdown()
    return one[0].tolist(), two[0].tolist()
