"""Megatron's private results queue: ours is the one it uses, and it dies with a killed trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_TRAINER = """
import time
from pathlib import Path
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron_patches import writer_queue

if __name__ == "__main__":
    writer_queue.prepare_writer_queue()
    assert filesystem_async._get_write_results_queue() is filesystem_async._results_queue
    print(writer_queue._manager._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_the_queue_server_dies_with_a_killed_trainer(tmp_path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(_TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    server = int(trainer.stdout.readline())
    os.kill(server, 0)  # it is there
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(60)
    for _ in range(600):
        try:
            os.kill(server, 0)
            if Path(f"/proc/{server}/stat").read_text().split()[2] == "Z":
                return  # dead, waiting for init to collect it
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail(f"the queue server {server} outlived its trainer")
