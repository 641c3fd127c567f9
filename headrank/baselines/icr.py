"""ICR (in-context reranking): every head of every layer, calibrated, no selection."""

from __future__ import annotations

from pathlib import Path

from headrank.heads import HeadSet
from headrank.model_config import load_config
from headrank.prompt import PromptTemplate


def all_heads(model: str | Path, prompt: PromptTemplate | None = None) -> HeadSet:
    """The head set of ICR on this model: the sum over all heads and layers is its score."""
    config = load_config(model).get_text_config(decoder=True)
    return HeadSet.all_heads(int(config.num_hidden_layers), int(config.num_attention_heads), model=str(model), prompt=prompt)
