"""Megatron's private results queue: ours is the one it uses, and it takes no process."""

from __future__ import annotations

import multiprocessing

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_patches.writer_queue import prepare_writer_queue


def test_megatron_uses_our_queue_and_starts_no_manager_process(monkeypatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = len(multiprocessing.active_children())
    prepare_writer_queue()
    ours = filesystem_async._get_write_results_queue()
    ours.put({"bucket": []})
    assert ours is filesystem_async._results_queue and ours.get_nowait() == {"bucket": []}
    assert len(multiprocessing.active_children()) == before


def test_a_queue_that_is_already_there_is_kept(monkeypatch) -> None:
    there = object()
    monkeypatch.setattr(filesystem_async, "_results_queue", there)
    prepare_writer_queue()
    assert filesystem_async._get_write_results_queue() is there
