"""ICR (in-context reranking): every head of every layer, calibrated, no selection."""

from __future__ import annotations

from pathlib import Path

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.model_config import model_size


def all_heads(model: str | Path, prompt: PromptTemplate | None = None) -> HeadSet:
    """The head set of ICR on this model: the sum over all heads and layers is its score."""
    return HeadSet.all_heads(*model_size(model), model=str(model), prompt=prompt)
