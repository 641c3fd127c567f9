"""Megatron's checkpoint writers: our queue is the one they use, it takes no process, and they die with the trainer."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_patches.checkpoints.writers import prepare_writers

TRAINER = """
import multiprocessing, time
from megatron_patches.checkpoints.writers import tie_forked_processes
tie_forked_processes()
writer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
writer.start()
print(writer.pid, flush=True)
time.sleep(600)
"""


def test_megatron_uses_our_queue_and_starts_no_manager_process(monkeypatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = len(multiprocessing.active_children())
    prepare_writers()
    ours = filesystem_async._get_write_results_queue()
    ours.put({"bucket": []})
    assert ours is filesystem_async._results_queue and ours.get_nowait() == {"bucket": []}
    assert len(multiprocessing.active_children()) == before


def test_a_queue_that_is_already_there_is_kept(monkeypatch) -> None:
    there = object()
    monkeypatch.setattr(filesystem_async, "_results_queue", there)
    prepare_writers()
    assert filesystem_async._get_write_results_queue() is there


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_writer_dies_with_its_trainer() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    writer = int(trainer.stdout.readline())
    assert lives(writer)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 20
    while lives(writer) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(writer)


def lives(process: int) -> bool:
    """Whether it is there and no zombie: who reaps orphans is the machine's affair."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
