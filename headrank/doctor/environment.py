"""Settings from the environment, without their secrets, and the places that headrank writes to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from headrank.doctor.finding import Finding, Findings
from headrank.errors import InputError
from headrank.log_level import log_level

_OURS = ("HEADRANK_",)
_OTHERS = (
    *(
        "OMP_",
        "MKL_",
        "ONEDNN_",
        "GOMP_",
        "KMP_",
        "CUDA_",
        "NVIDIA_",
        "HIP_",
        "ROCR_",
        "NCCL_",
        "GLOO_",
        "TORCH",
        "PYTORCH_",
    ),
    *(
        "HF_",
        "HUGGINGFACE_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "MASTER_",
        "NODE_RANK",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "SLURM_",
    ),
    *(
        "RAY_",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "XDG_CACHE_HOME",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
    ),
)
_SECRET_NAME = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|JWT|_PAT\b", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|xox[bap]-|AKIA|glpat-|eyJ)[\w.-]{8,}")
_USER_OF_URL = re.compile(r"(\w+://)[^/@\s]+@")
_FREE_GIB = 2


def look_at_environment(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Variables that change what headrank does, and the cache."""
    findings = Findings("environment")
    for name in sorted(environment):
        if name.upper().startswith((*_OURS, *_OTHERS)):
            findings.ok(f"{name}={shown_value(name, environment[name])}")
    try:
        log_level()
    except InputError as error:
        findings.problem(str(error).partition(";")[0], "use DEBUG, INFO, WARNING or ERROR, or unset it")
    _check_cache(findings)
    return findings.found


def shown_value(name: str, value: str) -> str:
    """The value of a variable as it may be shown to strangers: secrets by name or by look are only said to be set."""
    if _SECRET_NAME.search(name):
        return "(set, not shown)" if value else "(empty)"
    # a proxy's address may hold a password although its name is harmless
    return _SECRET_VALUE.sub("(not shown)", _USER_OF_URL.sub(r"\1(not shown)@", value))[:300]


def _check_cache(findings: Findings) -> None:
    """The cache must be writable, and large enough for the embedded model unless it is there."""
    from headrank.reranking.embedded_model import cache_directory

    cache = cache_directory()
    # the cache is made on first use: what counts is the nearest folder above it that is there
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        findings.problem(f"cache {cache}: {existing} cannot be written", "set HEADRANK_CACHE to a writable folder")
        return
    free = shutil.disk_usage(existing).free / 2**30
    size = f"cache {cache}, {free:.0f} GiB free"
    if free < _FREE_GIB:
        findings.problem(
            f"{size}; models need {_FREE_GIB}", "make room, or set HEADRANK_CACHE to a folder on another disk"
        )
    else:
        findings.ok(size, free_gib=round(free, 1))
