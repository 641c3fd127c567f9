"""Joining and leaving the process group where no GPU is: what would be done with one is asked, not run."""

from __future__ import annotations

import pytest
import torch

from headrank.errors import InputError
from megatron_patches import device


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A note for every time the groups were left; the world is one process unless a test says otherwise."""
    calls: list[str] = []
    monkeypatch.setattr(device, "shutdown", lambda: calls.append("left"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    return calls


def fail() -> None:
    with device.process_group_cleanup():
        raise RuntimeError("out of memory")


def test_the_groups_are_left_at_the_end(left: list[str]) -> None:
    with device.process_group_cleanup():
        assert not left
    assert left == ["left"]


def test_a_failing_rank_says_so_at_once_instead_of_waiting_for_the_others(
    left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert left == ["left"], "alone it leaves in order"
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert left == ["left"], "NCCL would wait for the others here"


def test_more_processes_than_gpus_are_refused_by_every_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for rank in (0, 7):
        with pytest.raises(InputError, match=r"8 processes on this machine, but 4 GPU\(s\); .*--nproc-per-node 4"):
            device._require_a_gpu_each(rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    device._require_a_gpu_each(3)
