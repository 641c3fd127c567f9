"""A plain decoder for the families whose layers are alike: Llama, Mistral without a window, Qwen2 and Qwen3.

transformers can run every decoder, but importing its modelling code takes longer than reranking a list of twenty
passages. This module computes the same numbers, operation by operation, for local models of the usual shape; everything
else stays with transformers (see ``headrank/reranking/reader.py``). It calls the same attention function as
transformers does, so what is captured does not know which of the two ran.

Shapes: B batch, S sequence, E hidden size, H query heads, G key-value groups, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headrank.reranking.capture import headrank_attention
from headrank.reranking.decoder_files import DecoderShape, read_weights, refuse_incomplete

Attention = Callable[..., tuple[torch.Tensor, None]]
Rotation = tuple[torch.Tensor, torch.Tensor]


def unread(*shape: int) -> nn.Parameter:
    """A weight before its file is read: no memory, no random numbers (torch's initialisers would import its
    compiler).
    """
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Projection(nn.Module):
    """A linear layer whose weight comes from a file."""

    def __init__(self, num_inputs: int, num_outputs: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = unread(num_outputs, num_inputs)
        self.bias = unread(num_outputs) if has_bias else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """values @ weight^T + bias."""
        return F.linear(values, self.weight, self.bias)


class Embedding(nn.Module):
    """The table of token vectors; only the rows that are asked for are ever read from a mapped file."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = unread(num_tokens, size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The vectors [..., E] of some ids."""
        return F.embedding(input_ids, self.weight)


class Norm(nn.Module):
    """RMS norm in float32 whatever the dtype, as the families define it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = unread(size), epsilon

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Scale the last axis to a root mean square of one, then by the weight."""
        # float32 inside: a mean of thousands of bfloat16 squares keeps two digits
        wide = F.rms_norm(values.float(), self.weight.shape, None, self.epsilon)
        return self.weight * wide.to(values.dtype)


class DecoderAttention(nn.Module):
    """Projections and rotation; the attention itself is the registered function, which also captures."""

    is_causal = True

    def __init__(self, shape: DecoderShape, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_size = layer_idx, shape.head_dim
        width, narrow = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Projection(shape.hidden_size, width, has_bias=shape.has_query_bias)
        self.k_proj = Projection(shape.hidden_size, narrow, has_bias=shape.has_query_bias)
        self.v_proj = Projection(shape.hidden_size, narrow, has_bias=shape.has_query_bias)
        self.o_proj = Projection(width, shape.hidden_size, has_bias=shape.has_output_bias)
        if shape.has_head_norms:
            self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.has_head_norms = shape.has_head_norms
        self.joined_read: nn.Module | None = None
        self.joined_write: nn.Module | None = None

    def forward(self, hidden_BSE: torch.Tensor, rotation: Rotation, attend: Attention, capture: Any) -> torch.Tensor:
        """The layer's contribution [B, S, E]."""
        query, key, value = (self._heads(values) for values in self.read(hidden_BSE))
        if self.has_head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query_BHSD, key_BGSD = (rotate(values.transpose(1, 2), rotation) for values in (query, key))
        context_BSHD, _ = attend(self, query_BHSD, key_BGSD, value.transpose(1, 2), None, headrank=capture)
        return self.write(context_BSHD.reshape(*hidden_BSE.shape[:2], -1))[0]

    def read(self, hidden_BSE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values; one product after ``headrank/reranking/joined.py`` joined them."""
        if self.joined_read is not None:
            return self.joined_read(hidden_BSE)
        return self.q_proj(hidden_BSE), self.k_proj(hidden_BSE), self.v_proj(hidden_BSE)

    def write(self, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output projection, packed in the same way."""
        return (self.o_proj(context),) if self.joined_write is None else self.joined_write(context)

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(*values.shape[:2], -1, self.head_size)


class GatedUnit(nn.Module):
    """The SwiGLU of every one of these families."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden_size, shape.intermediate_size, has_bias=False)
        self.up_proj = Projection(shape.hidden_size, shape.intermediate_size, has_bias=False)
        self.down_proj = Projection(shape.intermediate_size, shape.hidden_size, has_bias=False)
        self.joined_read: nn.Module | None = None
        self.joined_write: nn.Module | None = None

    def forward(self, hidden_BSE: torch.Tensor) -> torch.Tensor:
        """down(silu(gate(x)) * up(x))."""
        gate, up = self.read(hidden_BSE)
        return self.write(F.silu(gate) * up)[0]

    def read(self, hidden_BSE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gate and value."""
        if self.joined_read is not None:
            return self.joined_read(hidden_BSE)
        return self.gate_proj(hidden_BSE), self.up_proj(hidden_BSE)

    def write(self, inner: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Back to the stream."""
        return (self.down_proj(inner),) if self.joined_write is None else self.joined_write(inner)


class DecoderLayer(nn.Module):
    """Attention and gated unit, each behind a norm and added to the stream."""

    def __init__(self, shape: DecoderShape, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DecoderAttention(shape, layer_idx)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedUnit(shape)

    def forward(self, hidden_BSE: torch.Tensor, rotation: Rotation, attend: Attention, capture: Any) -> torch.Tensor:
        """The stream after this layer; the attention function may leave by an exception once it has read enough."""
        hidden_BSE = hidden_BSE + self.self_attn(self.input_layernorm(hidden_BSE), rotation, attend, capture)
        return hidden_BSE + self.mlp(self.post_attention_layernorm(hidden_BSE))


class Decoder(nn.Module):
    """Embedding and the first ``num_layers`` layers. No final norm and no LM head: nobody reads them."""

    is_int8 = False
    is_joined = False

    def __init__(self, shape: DecoderShape, num_layers: int, attend: Attention) -> None:
        super().__init__()
        self.config, self.attend = shape.truncated(num_layers), attend
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, index) for index in range(num_layers))
        steps = torch.arange(0, shape.head_dim, 2).float()
        self.inverse_frequencies = 1.0 / (shape.rope_theta ** (steps / shape.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.embed_tokens.weight.dtype

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False, headrank: Any = None
    ) -> torch.Tensor:
        """The hidden states [B, S, E] behind the last layer, unless the capture leaves before."""
        hidden_BSE = self.embed_tokens(input_ids)
        rotation = self._rotation(position_ids, hidden_BSE)
        for layer in self.layers:
            hidden_BSE = layer(hidden_BSE, rotation, self.attend, headrank)
        return hidden_BSE

    def _rotation(self, position_ids_BS: torch.Tensor, like: torch.Tensor) -> Rotation:
        """Cosines and sines [B, 1, S, D], the first half of the sines negative; made in float32: bf16 cannot count
        beyond 256.
        """
        angles = position_ids_BS[:, None, :, None].float() * self.inverse_frequencies.to(like.device)
        cosines, sines = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def rotate(values_BHSD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding, halves convention."""
    cosines, sines = rotation
    first, second = values_BHSD.chunk(2, dim=-1)
    return values_BHSD * cosines + torch.cat((second, first), dim=-1) * sines


def load_decoder(model: str | Path, shape: DecoderShape, num_layers: int, dtype: torch.dtype) -> Decoder:
    """The first ``num_layers`` layers of a local model. In the file's own dtype the weights stay mapped: pages are
    read on use.
    """
    decoder = Decoder(shape, num_layers, headrank_attention)
    wanted = {name: weight.shape for name, weight in decoder.named_parameters()}
    weights = {
        name: weight.to(dtype) for name, weight in read_weights(model, num_layers) if wanted.get(name) == weight.shape
    }
    refuse_incomplete(model, set(wanted) - set(weights))
    decoder.load_state_dict(weights, assign=True, strict=True)
    return decoder.requires_grad_(False).eval()
