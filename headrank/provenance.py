"""Facts that every result carries: versions and peak memory."""

from __future__ import annotations

import platform
import resource
import sys
from importlib import metadata

PACKAGES = ("headrank", "torch", "transformers", "megatron-core", "numpy", "bm25s", "ir-measures")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide numbers; a package that is not there is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_memory_bytes() -> int:
    """The process's peak resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
