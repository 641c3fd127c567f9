"""Model names: what 'embedded' means is the same in Python and in the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrank import HeadRankReranker, InputError
from headrank.reranking import embedded_model as embedded
from headrank.reranking.model_sources import resolve_model

PASSAGES = [
    "The price of concrete rose again.",
    "Rosin makes the violin bow grip the string.",
    "A cycle lasts a month.",
]


def test_paths_and_hub_names_stay_as_they_are() -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_model(Path("models") / "mine") == "models/mine"


def test_embedded_is_the_directory_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "embedded_model_directory", lambda: tmp_path)
    assert resolve_model("embedded") == str(tmp_path)


def test_python_loads_the_embedded_model_by_name(embedded_model: Path) -> None:
    reranker = HeadRankReranker.from_pretrained("embedded", "all")
    ranked = reranker.rank("why does a violin bow need rosin", PASSAGES)
    assert ranked[0]["corpus_id"] == 1
    scores = reranker.score("why does a violin bow need rosin", PASSAGES)
    assert [row["score"] for row in ranked] == sorted(scores.tolist(), reverse=True)


def test_bad_input_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
    with pytest.raises(ValueError, match="no model there"):
        HeadRankReranker.from_pretrained("/nowhere/at/all", "all")
