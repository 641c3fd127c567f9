"""A model's configuration, read without its weights, and cut to fewer layers if need be.

transformers is imported only where its own configuration classes are needed: it costs seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrank.errors import InputError, first_line
from headrank.reranking.decoder_files import DecoderShape
from headrank.reranking.model_sources import base_of


def load_config(model: str | Path) -> Any:
    """The model's configuration; a missing model is one clear line."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(base_of(model))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{model}: no model there ({first_line(error)}); give a Hugging Face directory, a hub name or 'embedded'"
        ) from error


def text_config(config: Any) -> Any:
    """The decoder's own configuration, also of a model that sees pictures as well."""
    return config.get_text_config(decoder=True)


def model_size(model: str | Path) -> tuple[int, int]:
    """(layers, query heads) of a model, from its configuration alone."""
    config = DecoderShape.read(model) or text_config(load_config(model))
    return int(config.num_hidden_layers), int(config.num_attention_heads)


def truncate_config(config: Any, num_layers: int) -> None:
    """Keep the first ``num_layers`` layers of a configuration, per-layer lists included."""
    total = int(config.num_hidden_layers)
    if num_layers > total:
        raise InputError(f"layer {num_layers - 1} was asked for, but the model has only {total} layers")
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total and key != "architectures":
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers
