"""Reading a local model's files without transformers: its shape, its weights mapped into memory, its tokenizer.

``DecoderShape.read`` answers None for every model that is not of the plain kind, and transformers takes over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.errors import InputError
from headrank.reranking.model_sources import base_of

if TYPE_CHECKING:
    import torch

# What a family adds to the common layer. Gemma, Phi, Qwen-MoE and others differ inside the layer: transformers runs
# them.
_FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"has_query_bias": True}, "qwen3": {"has_head_norms": True}}


@dataclass(frozen=True)
class DecoderShape:
    """The numbers of config.json that a plain decoder is made of, under transformers' names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    pad_token_id: int | None = None
    has_query_bias: bool = False
    has_output_bias: bool = False
    has_head_norms: bool = False

    @classmethod
    def read(cls, model: str | Path) -> DecoderShape | None:
        """The shape of a local directory with safetensors and tokenizer.json, or None where transformers has to load
        it.
        """
        folder = Path(base_of(model))
        if not (folder / "tokenizer.json").is_file() or not _weight_files(folder):
            return None
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return cls._of(config) if _is_plain(config) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # transformers names what is wrong with such a file

    @classmethod
    def _of(cls, config: dict[str, Any]) -> DecoderShape:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        shape = cls(
            model_type=config["model_type"],
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(_rope(config)["rope_theta"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            pad_token_id=config.get("pad_token_id"),
            **_FAMILIES[config["model_type"]],
        )
        has_bias = bool(config.get("attention_bias"))
        return replace(shape, has_query_bias=True, has_output_bias=True) if has_bias else shape

    def truncated(self, num_layers: int) -> DecoderShape:
        """The same shape with fewer layers."""
        return replace(self, num_hidden_layers=num_layers)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain values."""
        return asdict(self)

    def get_text_config(self, **_: Any) -> DecoderShape:
        """Itself: these models read text only."""
        return self


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, where transformers 5 writes them and where older versions did."""
    rope = config.get("rope_parameters") or {}
    return {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta"), **rope}


def _is_plain(config: dict[str, Any]) -> bool:
    """Whether this module computes the model's layers as transformers does."""
    rope, layers = _rope(config), set(config.get("layer_types") or ["full_attention"])
    return (
        config.get("model_type") in _FAMILIES
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope["rope_theta"] is not None
        and rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) in (None, 1.0)
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("mlp_bias")
        and not config.get("quantization_config")
        and layers == {"full_attention"}
        # Qwen2 writes a window that it does not use
        and (config.get("sliding_window") is None or config.get("use_sliding_window") is False)
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, from the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return []
        return [folder / name for name in names] if all((folder / name).is_file() for name in names) else []
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def read_weights(model: str | Path, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name without "model.", tensor mapped from the file) of the embedding and of the layers below ``num_layers``.

    The weights that an adapter changes are merged with it, in float32.
    """
    from headrank.reranking.peft_folder import merge_weights

    return merge_weights(model, _stored_weights(Path(base_of(model)), num_layers), num_layers)


def _stored_weights(folder: Path, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    short = name.removeprefix("model.")
                    if short == "embed_tokens.weight" or _layer_of(short) < num_layers:
                        yield short, weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read ({error}); copy or export the model again") from error


def _layer_of(name: str) -> float:
    """The layer that a weight belongs to; infinity for the final norm and the LM head, which are not read."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() else float("inf")


def refuse_incomplete(model: str | Path, unfit: set[str]) -> None:
    """Weights that are missing or of another shape are an error: a model is whole or not loaded at all."""
    if unfit:
        raise InputError(
            f"{model}: {len(unfit)} weights are missing or of another shape than config.json says, "
            f"the first is {min(unfit)!r}; copy or export the model again"
        )
