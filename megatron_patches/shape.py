"""The sizes of a model, read from its Hugging Face configuration, and what tensor parallelism they allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from headrank.errors import InputError
from headrank.model_config import load_config

FAMILIES = ("qwen3", "llama", "qwen2", "qwen3_moe")


@dataclass(frozen=True)
class Llama3Scaling:
    """The rotary scaling of Llama 3.x: long wavelengths are stretched by ``factor``, short ones kept, smooth in
    between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, inverse_frequencies: torch.Tensor) -> torch.Tensor:
        """Scaled inverse frequencies, equal to Hugging Face's."""
        wavelengths = 2 * math.pi / inverse_frequencies
        longest = self.original_max_position_embeddings / self.low_freq_factor
        shortest = self.original_max_position_embeddings / self.high_freq_factor
        smooth = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        scaled = torch.where(wavelengths > longest, inverse_frequencies / self.factor, inverse_frequencies)
        between = (1 - smooth) * scaled / self.factor + smooth * scaled
        return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, scaled)


@dataclass(frozen=True)
class ModelShape:
    """Everything Megatron must know about a model. ``vocab`` is the checkpoint's number of embedding rows, unpadded."""

    family: Literal["qwen3", "llama", "qwen2", "qwen3_moe"]
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    rotary_base: float
    eps: float
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    max_positions: int
    rope_scaling: Llama3Scaling | None = None
    experts: int = 0  # of each layer; 0: one MLP of width ``ffn``
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalises_experts: bool = True  # the chosen experts' weights add up to one

    @classmethod
    def from_hf(cls, config: Any) -> ModelShape:
        """From a transformers configuration, or the directory or hub name of a model."""
        if isinstance(config, (str, Path)):
            config = load_config(config)
        family = config.model_type
        if family not in FAMILIES:
            raise InputError(
                f"model type {family!r} has no Megatron mapping here; the ones that do: {', '.join(FAMILIES)}"
            )
        _refuse_what_megatron_lacks(config, family)
        heads = config.num_attention_heads
        rope = _rope_parameters(config)
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            heads=heads,
            groups=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            rotary_base=float(rope["rope_theta"]),
            eps=config.rms_norm_eps,
            is_tied=bool(config.tie_word_embeddings),
            has_qk_norm=family in ("qwen3", "qwen3_moe"),
            has_qkv_bias=family == "qwen2",
            max_positions=config.max_position_embeddings,
            rope_scaling=_llama3_scaling(rope),
            **(_experts(config) if family == "qwen3_moe" else {}),
        )

    def inverse_frequencies(self) -> torch.Tensor:
        """Rotary inverse frequencies [head_dim / 2], equal to Hugging Face's bit for bit."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / (self.rotary_base**exponents)
        return frequencies if self.rope_scaling is None else self.rope_scaling.apply(frequencies)

    def padded_vocab(self, tensor_model_parallel_size: int) -> int:
        """The vocabulary rounded up to a multiple of the tensor-parallel size, the least that can be cut evenly."""
        return -(-self.vocab // tensor_model_parallel_size) * tensor_model_parallel_size


def valid_tensor_parallel_sizes(shape: ModelShape) -> tuple[int, ...]:
    """The sizes that divide query heads, key-value groups and MLP width."""
    # experts are never cut, but given out whole
    cut = [shape.groups, shape.heads, *([] if shape.experts else [shape.ffn])]
    return tuple(size for size in range(1, shape.groups + 1) if not any(number % size for number in cut))


def check_tensor_parallel_size(shape: ModelShape, size: int) -> None:
    """Raise InputError naming the sizes that work, when this one does not."""
    valid = valid_tensor_parallel_sizes(shape)
    if size not in valid:
        raise InputError(
            f"`tensor_model_parallel_size` {size} does not divide {shape.heads} heads, {shape.groups} key-value "
            "groups and "
            f"MLP width {shape.ffn}; this model can be split over {', '.join(map(str, valid))}"
        )


def _experts(config: Any) -> dict[str, Any]:
    """The mixture of experts, which must be the same in every layer."""
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise InputError(
            "layers with and without experts in one model (decoder_sparse_step, mlp_only_layers) are not supported "
            "on Megatron"
        )
    return {
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_ffn": config.moe_intermediate_size,
        "normalises_experts": bool(config.norm_topk_prob),
    }


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    """The rotary settings, where newer (rope_parameters) and older (rope_theta, rope_scaling) configurations keep
    them.
    """
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return rope


def _llama3_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"rotary scaling {kind!r} is not supported on Megatron; 'default' and 'llama3' are")
    return Llama3Scaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    )


def _refuse_what_megatron_lacks(config: Any, family: str) -> None:
    """Stop at settings that our Megatron model would silently ignore."""
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        kind = (
            quantised.get("quant_method")
            if isinstance(quantised, Mapping)
            else getattr(quantised, "quant_method", None)
        )
        raise InputError(
            f"the weights are quantised ({kind}), and their scales would be lost on Megatron; take the model in "
            "bfloat16"
        )
    if getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None):
        raise InputError(
            "this model uses sliding-window attention (use_sliding_window), which the Megatron model does not"
        )
    if config.hidden_act != "silu":
        raise InputError(f"hidden_act {config.hidden_act!r} is not supported on Megatron; 'silu' is")
    for name in ("mlp_bias",) if family == "qwen2" else ("mlp_bias", "attention_bias"):
        if getattr(config, name, False):
            raise InputError(f"{name}: true is not supported on Megatron for {family} models")
