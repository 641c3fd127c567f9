"""Layer specs with HeadRank's core attention in its slot, for our model and for stock Megatron-LM's ``--spec``.

``--spec megatron_patches.layer_spec QWEN3_LAYER_SPEC`` (or ``LLAMA_LAYER_SPEC``) gives stock Megatron the same network,
and a ``RowCapture`` handed to its GPTModel as ``packed_seq_params`` reads the rows of plain causal prompts. The
calibration branch and the parallel layout need HeadRankModel: positions restart there, which stock Megatron's rotary
embedding cannot do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from headrank.lora_settings import LoraSettings
from megatron_patches import device
from megatron_patches.attention import FusedHeadRankCoreAttention, HeadRankCoreAttention, QueryKeyAttention
from megatron_patches.gated_unit import GatedUnit
from megatron_patches.lora import adapted
from megatron_patches.norm import RootMeanSquareNorm
from megatron_patches.versions import submodules_of, transformer_engine_is_installed


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used: it is an extra, computes on GPUs only, and Megatron must have found it
    whole.
    """
    return device.has_cuda() and transformer_engine_is_installed()


def chosen_engine(transformer_impl: str | None, dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's: as --transformer-impl says, else where it can be used, but not in
    float32.

    Its float32 matrix products are TF32, and a float32 run is made to compare numbers.
    """
    if transformer_impl is not None:
        return transformer_impl == "transformer_engine"
    return has_transformer_engine() and dtype != torch.float32


def layer_spec(
    *,
    qk_norm: bool,
    use_transformer_engine: bool | None = None,
    lora: LoraSettings | None = None,
    num_experts: int | None = None,
    grouped: bool = False,
) -> ModuleSpec:
    """A whole decoder layer, with adapters where ``lora`` says; ``use_transformer_engine`` None takes it where it is
    installed.

    With ``num_experts`` a mixture of experts stands in the place of the MLP; ``grouped`` multiplies those of a rank
    together.
    """
    return _layer_spec(qk_norm, use_transformer_engine, lora, "linear_qkv", num_experts, grouped)


def _layer_spec(
    qk_norm: bool,
    use_transformer_engine: bool | None,
    lora: LoraSettings | None,
    attention_linear: str,
    num_experts: int | None = None,
    grouped: bool = False,
) -> ModuleSpec:
    """The same; ``attention_linear`` names what will stand in the slot of the fused QKV (lora.FUSED)."""
    experts: dict[str, Any] = {"num_experts": num_experts, "moe_grouped_gemm": grouped}
    use_transformer_engine = has_transformer_engine() if use_transformer_engine is None else use_transformer_engine
    if use_transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm, **experts)
        spec.submodules.self_attention.submodules.core_attention = FusedHeadRankCoreAttention
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm", **experts)
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        attention.core_attention = HeadRankCoreAttention
        layer.input_layernorm = layer.pre_mlp_layernorm = RootMeanSquareNorm
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = RootMeanSquareNorm
    if num_experts:
        # the norm before experts is part of no linear layer: on disk it has its own name with both kinds of layers
        kept = {
            key: name
            for key, name in spec.submodules.sharded_state_dict_keys_map.items()
            if not key.startswith("pre_mlp_layernorm")
        }
        spec.submodules.sharded_state_dict_keys_map = kept
        if not grouped:
            submodules_of(submodules_of(spec.submodules.mlp).experts).activation_func = GatedUnit
        return spec
    submodules_of(spec.submodules.mlp).activation_func = GatedUnit  # taken where our configuration says so: on a CPU
    if lora is not None:
        _adapt(spec.submodules, lora, use_transformer_engine, attention_linear)
    return spec


def _adapt(
    layer: TransformerLayerSubmodules, lora: LoraSettings, use_transformer_engine: bool, attention_linear: str
) -> None:
    """Put adapted classes into the slots of the linear layers.

    Transformer Engine fuses the norm into the linear layer behind it; an adapter needs the normalised input, so here
    both stand alone, under the names on disk that they have together.
    """
    attention, mlp = layer.self_attention.submodules, submodules_of(layer.mlp)
    if use_transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
        attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear
        layer.sharded_state_dict_keys_map = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    attention.linear_qkv = adapted(attention.linear_qkv, attention_linear, lora)
    attention.linear_proj = adapted(attention.linear_proj, "linear_proj", lora)
    mlp.linear_fc1, mlp.linear_fc2 = (
        adapted(mlp.linear_fc1, "linear_fc1", lora),
        adapted(mlp.linear_fc2, "linear_fc2", lora),
    )


class QueryKeyLayer(TransformerLayer):
    """Layer l_max: input norm, Q and K, rows. There is no MLP, and the output is the input, which nobody uses."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, None]:
        """Read the rows into the capture among the arguments (those of a TransformerLayer)."""
        # its rows are captured, its result is not used: the layer above l_max does not exist
        self.self_attention(self.input_layernorm(hidden_states), **arguments)
        return hidden_states, None


def query_key_layer_spec(
    *, qk_norm: bool, use_transformer_engine: bool | None = None, lora: LoraSettings | None = None
) -> ModuleSpec:
    """The last layer of a truncated model: the same input norm and Q/K modules, everything after them left out."""
    # copies all the way down: specs are shared objects, and a change of the last layer's would change every layer
    spec = copy.copy(_layer_spec(qk_norm, use_transformer_engine, lora, "linear_qk"))
    submodules = copy.copy(spec.submodules)
    attention = copy.copy(submodules.self_attention)
    attention.module = QueryKeyAttention
    submodules.self_attention = attention
    submodules.self_attn_bda = IdentityFuncOp
    submodules.pre_mlp_layernorm = IdentityOp
    submodules.mlp = IdentityOp
    submodules.mlp_bda = IdentityFuncOp
    # On disk both spellings of the norm in front of Q and K have one name, that of a whole layer.
    submodules.sharded_state_dict_keys_map = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_qk.layer_norm_": "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_qk.adapter.": "self_attention.linear_qkv.adapter.",
    }
    spec.module, spec.submodules = QueryKeyLayer, submodules
    return spec


def final_norm(use_transformer_engine: bool | None = None) -> type:
    """The norm module after the last layer."""
    use_transformer_engine = has_transformer_engine() if use_transformer_engine is None else use_transformer_engine
    if use_transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RootMeanSquareNorm


QWEN3_LAYER_SPEC = layer_spec(qk_norm=True)
LLAMA_LAYER_SPEC = layer_spec(qk_norm=False)
