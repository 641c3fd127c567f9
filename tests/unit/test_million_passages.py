"""The benchmark of a million passages, with three thousand: written, opened, looked up, scored, and keys compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import million_passages
from headrank.passage_store.store import PassageStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("million") / "store"
    million_passages.write(folder, 3000, segment_bytes=4 * 2**20)
    return folder


def test_three_thousand_passages_go_through_the_same_checks(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    million_passages.open_and_find(store, 3000)
    million_passages.read(store, 3000)
    printed = capsys.readouterr().out
    assert "3,000 passages in 3 segments" in printed and "warm: a list of 100" in printed


def test_opening_and_finding_read_no_keys_and_copy_no_index(store: Path) -> None:
    opened = PassageStore(store)
    for segment in opened.segments:
        for array in (segment.records, segment.bytes_of_keys, segment.firsts, segment.order):
            base = array
            while isinstance(base, np.ndarray):
                base = base.base
            assert isinstance(base, memoryview) or type(base).__name__ == "mmap", "mapped, not copied"


def test_the_checks_can_fail(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="found what is not there"):
        million_passages.open_and_find(store, 2000)
    monkeypatch.setattr(million_passages, "keys_of", lambda number: np.zeros((4, 20, 64), np.int8))
    with pytest.raises(AssertionError, match="is not what was written"):
        million_passages.read(store, 3000)
