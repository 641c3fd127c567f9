"""`headrank serve` as a process of its own on loopback, for load tests and for tests that kill it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_LISTENING = re.compile(r"listening on (http://\S+:\d+), loading")
PATIENCE = 300.0  # seconds for loading a model on a busy machine


class ServerProcess:
    """Started, waited for and stopped; its log is in a file that nobody has to empty."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """``arguments`` follow 'headrank serve'; without --port the system chooses."""
        given = list(arguments) if "--port" in arguments else [*arguments, "--port", "0"]
        # a file and not a pipe: a pipe that nobody reads would block the server once it is full
        self._log = tempfile.NamedTemporaryFile(prefix="headrank-serve-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrank", "serve", *given], stderr=self._log, stdout=self._log
        )
        self.url = self._wait_for_address()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        """What it wrote."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while (found := _LISTENING.search(self.log)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"headrank serve did not start (exit code {self.process.poll()}): {self.log[-2000:]}"
                )
            time.sleep(0.05)
        return found[1]

    def wait_until_ready(self) -> None:
        """Return when /ready says 200."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"headrank serve is not ready (exit code {self.process.poll()}): {self.log[-2000:]}"
                    ) from None
                time.sleep(0.1)

    def resident_bytes(self) -> int:
        """Memory of the process now (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by their printed names."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }

    def rerank(self, query: str, documents: Sequence[object], seconds: float = 60.0) -> dict[int, float]:
        """Document index -> score; long documents are read from their beginning, as offline."""
        body = json.dumps({"query": query, "documents": list(documents), "max_chunks_per_doc": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v2/rerank", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return {row["index"]: row["relevance_score"] for row in json.load(response)["results"]}
