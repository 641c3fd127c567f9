"""Hugging Face weights <-> Megatron-Core weights: one table, read by import, by export and by loading straight into a
model.

The table speaks Megatron's names on disk (the Transformer-Engine spelling); the local layer spec's spelling of the
norms is an alias. Every row says from which Hugging Face tensors a Megatron tensor is made, how they are cut over
tensor-parallel ranks and how they are joined: groups interleaved (QKV), stacked (gated MLP), or alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrank.errors import InputError
from megatron_patches.checkpoints.safetensors_files import SafetensorsReader
from megatron_patches.lora import adapter_parameter
from megatron_patches.readout_weights import PARAMETER
from megatron_patches.shape import ModelShape

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Mapping:
    """One row: the Hugging Face tensors behind a Megatron tensor, the axis cut over ranks (None: replicated), the
    join.
    """

    sources: tuple[str, ...]
    axis: int | None
    join: Literal["alone", "stack", "groups"] = "alone"
    is_vocabulary: bool = False


LAYER_TABLE: dict[str, Mapping] = {
    "self_attention.linear_qkv.layer_norm_weight": Mapping(("input_layernorm.weight",), None),
    "self_attention.linear_qkv.weight": Mapping(tuple(f"{name}.weight" for name in _QKV), 0, "groups"),
    "self_attention.linear_qkv.bias": Mapping(tuple(f"{name}.bias" for name in _QKV), 0, "groups"),
    "self_attention.linear_qk.weight": Mapping(tuple(f"{name}.weight" for name in _QKV[:2]), 0, "groups"),
    "self_attention.linear_qk.bias": Mapping(tuple(f"{name}.bias" for name in _QKV[:2]), 0, "groups"),
    "self_attention.q_layernorm.weight": Mapping(("self_attn.q_norm.weight",), None),
    "self_attention.k_layernorm.weight": Mapping(("self_attn.k_norm.weight",), None),
    "self_attention.linear_proj.weight": Mapping(("self_attn.o_proj.weight",), 1),
    "mlp.linear_fc1.layer_norm_weight": Mapping(("post_attention_layernorm.weight",), None),
    "mlp.linear_fc1.weight": Mapping(("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0, "stack"),
    "mlp.linear_fc2.weight": Mapping(("mlp.down_proj.weight",), 1),
}
# a layer with experts has these instead of the MLP; its norm stands alone, and every expert has a row of its own
EXPERTS_TABLE: dict[str, Mapping] = {
    "pre_mlp_layernorm.weight": Mapping(("post_attention_layernorm.weight",), None),
    "mlp.router.weight": Mapping(("mlp.gate.weight",), None),
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(linear_fc[12])\.weight")
MODEL_TABLE: dict[str, Mapping] = {
    "embedding.word_embeddings.weight": Mapping(("model.embed_tokens.weight",), 0, is_vocabulary=True),
    "decoder.final_layernorm.weight": Mapping(("model.norm.weight",), None),
    "output_layer.weight": Mapping(("lm_head.weight",), 0, is_vocabulary=True),
}
# the local layer spec keeps its norms outside the linear layers, and l_max's live in front of linear_qk
_ALIASES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qk.layer_norm_weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


_LOCAL_EXPERT = re.compile(
    r"(.*\.mlp\.experts)\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))"
)


def mapping_of(name: str) -> Mapping:
    """The table's row for a Megatron parameter in either spelling, its sources with full Hugging Face names."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        row = MODEL_TABLE.get(name)
    else:
        layer, rest = match.groups()
        row = EXPERTS_TABLE.get(rest) or LAYER_TABLE.get(_ALIASES.get(rest, rest)) or _expert_row(rest)
        if row is not None:
            sources = tuple(f"model.layers.{layer}.{source}" for source in row.sources)
            row = Mapping(sources, row.axis, row.join, row.is_vocabulary)
    if row is None:
        raise KeyError(f"{name} has no Hugging Face counterpart")
    return row


def _expert_row(rest: str) -> Mapping | None:
    """Expert by expert, by its number in the whole model: mlp.experts.17.linear_fc1.weight."""
    match = _EXPERT.fullmatch(rest)
    if match is None:
        return None
    names = ("gate_proj", "up_proj") if match.group(2) == "linear_fc1" else ("down_proj",)
    sources = tuple(f"mlp.experts.{match.group(1)}.{name}.weight" for name in names)
    return Mapping(sources, 0, "stack") if len(sources) > 1 else Mapping(sources, 1)


def source_shape(shape: ModelShape, source: str) -> tuple[int, ...]:
    """The shape a Hugging Face tensor of this model must have."""
    query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    width = shape.expert_ffn if ".experts." in source else shape.ffn
    rows = {"q_proj": query, "k_proj": key, "v_proj": key, "gate_proj": width, "up_proj": width, "gate": shape.experts}
    module, kind = source.split(".")[-2:]
    if module in ("embed_tokens", "lm_head"):
        return (shape.vocab, shape.hidden)
    if module in ("q_norm", "k_norm"):
        return (shape.head_dim,)
    if module in rows:
        return (rows[module],) if kind == "bias" else (rows[module], shape.hidden)
    if module == "o_proj":
        return (shape.hidden, query)
    if module == "down_proj":
        return (shape.hidden, width)
    return (shape.hidden,)


def megatron_names(shape: ModelShape) -> Iterator[str]:
    """Every tensor of the full-depth model by its name on disk, in the order of the forward pass."""
    yield "embedding.word_embeddings.weight"
    for layer in range(shape.layers):
        for name in _names_in_layer(shape):
            is_absent = (
                ".linear_qk." in name
                or (not shape.has_qk_norm and name.endswith(("q_layernorm.weight", "k_layernorm.weight")))
                or (not shape.has_qkv_bias and name.endswith(".bias"))
            )
            if not is_absent:
                yield f"decoder.layers.{layer}.{name}"
    yield "decoder.final_layernorm.weight"
    if not shape.is_tied:
        yield "output_layer.weight"


def _names_in_layer(shape: ModelShape) -> list[str]:
    if not shape.experts:
        return list(LAYER_TABLE)
    attention = [name for name in LAYER_TABLE if not name.startswith("mlp.")]
    experts = [
        f"mlp.experts.{expert}.{linear}.weight"
        for expert in range(shape.experts)
        for linear in ("linear_fc1", "linear_fc2")
    ]
    return [*attention, *EXPERTS_TABLE, *experts]


def read_shard(
    reader: SafetensorsReader,
    name: str,
    shape: ModelShape,
    rank: int = 0,
    size: int = 1,
    padded_vocab_size: int | None = None,
) -> torch.Tensor:
    """The part of Megatron tensor ``name`` that tensor-parallel rank ``rank`` of ``size`` holds, read slice by slice.

    Vocabulary rows beyond the checkpoint's are zero.
    """
    row = mapping_of(name)
    pieces = []
    for source in row.sources:
        expected = source_shape(shape, source)
        _check_shape(reader, source, expected)
        if row.axis is None:
            pieces.append(reader.read(source))
            continue
        length = (padded_vocab_size or shape.padded_vocab(size)) if row.is_vocabulary else expected[row.axis]
        chunk = length // size
        start, stop = min(rank * chunk, expected[row.axis]), min((rank + 1) * chunk, expected[row.axis])
        piece = reader.read(source, row.axis, start, stop)
        if stop - start < chunk:
            piece = torch.cat([piece, piece.new_zeros(chunk - (stop - start), *piece.shape[1:])])
        pieces.append(piece)
    return join_sources(row, pieces, shape.groups // size)


def join_sources(row: Mapping, pieces: list[torch.Tensor], num_groups: int) -> torch.Tensor:
    """Join Hugging Face tensors (or equal cuts of them) into Megatron's: per group its queries, its key, its value;
    or stacked.
    """
    if row.join == "alone":
        return pieces[0]
    if row.join == "stack":
        return torch.cat(pieces)
    return torch.cat([piece.unflatten(0, (num_groups, -1)) for piece in pieces], dim=1).flatten(0, 1)


def split_sources(row: Mapping, tensor: torch.Tensor, shape: ModelShape) -> dict[str, torch.Tensor]:
    """The inverse on a whole (unsharded) tensor: Hugging Face name -> tensor; padding rows of the vocabulary are cut
    off.
    """
    if row.join == "alone":
        return {row.sources[0]: tensor[: shape.vocab] if row.is_vocabulary else tensor}
    sizes = [source_shape(shape, source)[0] for source in row.sources]
    if row.join == "stack":
        return dict(zip(row.sources, tensor.split(sizes), strict=True))
    grouped = tensor.unflatten(0, (shape.groups, -1)).split([size // shape.groups for size in sizes], dim=1)
    return {source: piece.flatten(0, 1) for source, piece in zip(row.sources, grouped, strict=True)}


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, hf_directory: str) -> None:
    """Fill this rank's part of a model from a Hugging Face directory, reading only the slices this rank needs.

    Works on the bare model and inside Megatron's wrappers. A truncated model reads nothing above its last layer. A
    missing or wrongly shaped tensor is an InputError that names it; every parameter of the model is filled but those of
    adapters.
    """
    from megatron.core.utils import unwrap_model

    bare = unwrap_model(model)
    with SafetensorsReader(hf_directory) as reader:
        for name, parameter in bare.named_parameters():
            if name == PARAMETER:  # what training adds to a readout: nothing yet
                parameter.zero_()
                continue
            if adapter_parameter(name) is not None:
                continue
            source = _with_global_expert(name, bare)
            if name == "output_layer.weight" and "lm_head.weight" not in reader and bare.shape.is_tied:
                source = "embedding.word_embeddings.weight"
            whole = source != name  # experts are given out whole
            rank, size = (0, 1) if whole and ".experts." in name else (bare.tp_group.rank(), bare.tp_group.size())
            value = read_shard(reader, source, bare.shape, rank, size, bare.padded_vocab_size)
            assert value.shape == parameter.shape, f"{name}: {tuple(value.shape)} does not fit {tuple(parameter.shape)}"
            parameter.copy_(value)


def _with_global_expert(name: str, model: Any) -> str:
    """An expert's parameter by its number in the whole model; Megatron counts those of this rank, one by one or
    grouped.
    """
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        return name
    before, alone, linear, grouped_linear, grouped = match.groups()
    per_rank = model.shape.experts // model.pg_collection.ep.size()
    number = model.pg_collection.ep.rank() * per_rank + int(alone or grouped)
    return f"{before}.{number}.{linear or grouped_linear}.weight"


def _check_shape(reader: SafetensorsReader, source: str, expected: tuple[int, ...]) -> None:
    if source not in reader:
        raise InputError(f"{reader.directory}: tensor {source!r} is missing; config.json says the model has it")
    found = reader.shape(source)
    if found != expected:
        raise InputError(
            f"{reader.directory}: tensor {source!r} has shape {list(found)}, config.json asks for {list(expected)}"
        )
