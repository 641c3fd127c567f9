"""The benchmark of a million contexts, with a thousand: made, tokenised, walked, resumed, and every sample compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks import million_contexts
from data_tools.epoch_order import EpochOrder
from tests.tiny_models import tiny_tokenizer


def test_a_thousand_contexts_go_through_the_same_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    million_contexts.make(tmp_path, 1000)
    million_contexts.read(tmp_path, tiny_tokenizer(), 100)
    printed = capsys.readouterr().out
    assert "1,000 contexts, 1,000 pairs, 1,000 samples" in printed
    data = million_contexts.open_set(tmp_path, tiny_tokenizer())
    assert all(
        isinstance(getattr(data.cache, name), np.memmap) for name in ("tokens", "rows", "spans", "pairs", "names")
    )


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    million_contexts.make(tmp_path, 20)
    tokenizer = tiny_tokenizer()
    data = million_contexts.open_set(tmp_path, tokenizer)
    sample = data.at(3)
    million_contexts.check_sample(sample, tokenizer)
    with pytest.raises(AssertionError, match=sample.context_id):
        million_contexts.check_sample(dataclasses.replace(sample, context_index=sample.context_index + 1), tokenizer)
    monkeypatch.setattr(EpochOrder, "__getitem__", lambda self, index: 0)
    with pytest.raises(AssertionError, match="20 samples do not come exactly once"):
        million_contexts.check_order(data)
