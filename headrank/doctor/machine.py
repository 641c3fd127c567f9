"""Where a model would run and how: device, number format, threads, kernels. The part that imports torch."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from headrank.doctor.finding import Finding, Findings, split_error
from headrank.errors import InputError

if TYPE_CHECKING:
    import torch


def look_at_machine(device: str | None = None, dtype: str | None = None) -> list[Finding]:
    """What `headrank rerank` with these flags would use; a torch that cannot be imported is the first finding, and
    the last.
    """
    findings = Findings("machine")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that is not there
        findings.problem(
            f"torch cannot be imported ({str(error).splitlines()[0]})",
            "install torch again, first and alone: pip install torch",
        )
        return findings.found
    from headrank.placement import choose_attention, fastest_float, resolve_device

    # these are decided by the reranker and not by torch
    is_plain = dtype in (None, "auto", "int8")
    try:
        chosen, number_format = resolve_device(device, None if is_plain else dtype)
        if is_plain and chosen.type == "cuda":
            number_format, _ = fastest_float(chosen, number_format)
    except InputError as error:
        findings.problem(*split_error(str(error)))
        return findings.found
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else _processor()
    findings.ok(f"device {chosen} ({name}), torch {torch.__version__}", device=str(chosen))
    if chosen.type == "cpu":
        _look_at_cpu(findings, torch, dtype)
    else:
        findings.ok(
            f"dtype {str(number_format).removeprefix('torch.')}", dtype=str(number_format).removeprefix("torch.")
        )
    if chosen.type == "cuda":
        _look_at_gpu(findings, torch, chosen)
        try:
            findings.ok(
                f"attention: torch's {choose_attention(chosen, number_format)} kernel, HEADRANK_ATTENTION names another"
            )
        except InputError as error:
            findings.problem(*split_error(str(error)))
    return findings.found


def _look_at_cpu(findings: Findings, torch: Any, dtype: str | None) -> None:
    """Threads, the instructions for bfloat16 and int8, and settings that make processes wait for each other."""
    from headrank.placement import available_cores, fast_bfloat16, use_available_cores

    cores, threads = available_cores(), use_available_cores()
    instructions, capability = fast_bfloat16(), torch.backends.cpu.get_cpu_capability()
    wanted = {"int8": "int8", "auto": "bfloat16" if instructions else "float32"}.get(dtype or "", dtype)
    default = "float32, and for heads of the late layout auto: " + ("bfloat16" if instructions else "float32")
    findings.ok(f"dtype {wanted or default}", dtype=wanted or "float32", auto="bfloat16" if instructions else "float32")
    findings.ok(
        f"kernels: SDPA on {capability}; bfloat16 products by {instructions or 'no instructions of their own'}",
        isa=capability,
    )
    if wanted in ("bfloat16", "float16") and not instructions:
        findings.note(f"{wanted} is slower than float32 on this processor; leave --dtype out, or use int8")
    findings.ok(f"{threads} of {cores} cores as threads", threads=threads, cores=cores)
    # a container's quota is smaller than the machine, and OMP_NUM_THREADS often comes from the machine
    if threads > cores:
        remedy = f"unset OMP_NUM_THREADS, or set it to {cores}"
        findings.problem(
            f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')} is more threads than this process has cores", remedy
        )
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        findings.problem(
            "OMP_WAIT_POLICY=ACTIVE lets waiting threads spin",
            "set OMP_WAIT_POLICY=PASSIVE when several processes share cores",
        )


def _look_at_gpu(findings: Findings, torch: Any, device: torch.device) -> None:
    """Memory, and what the kernels of the parallel layout need."""
    free, total = (number / 2**30 for number in torch.cuda.mem_get_info(device))
    major, minor = torch.cuda.get_device_capability(device)
    findings.ok(f"{free:.1f} of {total:.1f} GiB free, compute capability {major}.{minor}", free_gib=round(free, 1))
    if major < 8:
        findings.note(
            "this GPU has no bfloat16: the default is float32; --dtype float16 is faster where the model's numbers "
            "fit it"
        )
    if shutil.which("cc") or shutil.which("gcc") or os.environ.get("CC"):
        findings.ok("kernels: SDPA, and FlexAttention for the parallel layout")
    else:
        remedy = "install a C compiler (gcc), which Triton needs to build its launcher"
        findings.problem("FlexAttention cannot be compiled: there is no C compiler", remedy)


def _processor() -> str:
    """The processor's name, where the system says it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            return next(line.partition(":")[2].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
