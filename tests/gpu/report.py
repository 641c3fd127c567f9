"""The one file that a node sends back: the machine, and what every check found. Written anew after each, so a crash
loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrank.formats import write_json
from headrank.provenance import versions

FORMAT = "headrank-gpu-report/1"


class Report:
    """Facts by check."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"format": FORMAT, "machine": machine(), "checks": {}}
        write_json(path, self.content)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Facts go into the dictionary, also those found before an assertion fails."""
        entry: dict[str, Any] = {"status": "running", "facts": {}}
        self.content["checks"][name] = entry
        started = time.monotonic()
        try:
            yield entry["facts"]
            entry["status"] = "passed"
        except BaseException as error:
            entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:4000]}
            raise
        finally:
            entry["seconds"] = round(time.monotonic() - started, 1)
            write_json(self.path, self.content)


def machine() -> dict[str, Any]:
    """What a reader must know to judge the numbers."""
    found: dict[str, Any] = {"versions": versions(), "cuda": torch.version.cuda, "gpus": []}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": properties.name, "mebibytes": properties.total_memory >> 20})
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name, module in (("transformer_engine", "transformer_engine"), ("flash_attn", "flash_attn"), ("apex", "amp_C")):
        with contextlib.suppress(Exception):
            found[name] = str(getattr(__import__(module), "__version__", "there"))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
        found["topology"] = topology.splitlines()
    return json.loads(json.dumps(found))
