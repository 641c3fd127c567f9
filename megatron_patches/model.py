"""The Megatron model HeadRank trains: embeddings and decoder layers 0..l_max, the last of which only makes Q and K.

No output layer and no final norm unless they are asked for (conversion, parity tests). Head numbers outside are Hugging
Face's; inside, rank r owns heads r*P .. r*P + P - 1. Shapes: B batch, S sequence, P heads on this rank, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from headrank.errors import InputError
from headrank.lora_settings import LoraSettings
from headrank.method.attention import BranchLayout
from megatron_patches import device
from megatron_patches.attention import LayerRows, RowCapture
from megatron_patches.late import CapturedKeys, LateCapture, LateRows
from megatron_patches.layer_spec import final_norm, layer_spec, query_key_layer_spec
from megatron_patches.prompt_log_mass import CapturedRatios
from megatron_patches.readout_weights import ReadoutDelta
from megatron_patches.shape import ModelShape, check_tensor_parallel_size, valid_tensor_parallel_sizes
from megatron_patches.versions import complete_router

__all__ = [
    "CapturedRows",
    "HeadRankModel",
    "ModelShape",
    "build_model",
    "build_transformer_config",
    "valid_tensor_parallel_sizes",
]


@dataclass
class CapturedRows:
    """What one micro-batch's forward read on this rank: layer -> its heads here and their rows, in ascending layers.

    Every captured layer is present on every rank, with no heads where this rank owns none of the asked ones.
    """

    rows: dict[int, LayerRows] = field(default_factory=dict)


def build_transformer_config(
    shape: ModelShape,
    *,
    tensor_model_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    recompute_first_layers: int | None = None,
    recompute_modules: Sequence[str] = (),
    sequence_parallel: bool = False,
    perform_initialization: bool = True,
    **overrides: Any,
) -> TransformerConfig:
    """Megatron's configuration of this model. ``recompute`` keeps only layer inputs and recomputes each layer in
    backward.

    ``recompute_first_layers`` does so for that many layers; ``recompute_modules`` recomputes parts of each layer
    instead (Megatron's granularity "selective"). ``perform_initialization`` False leaves fresh weights undefined, for
    models that are about to be loaded.
    """
    check_tensor_parallel_size(shape, tensor_model_parallel_size)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.eps,
        "normalization": "RMSNorm",
        "qk_layernorm": shape.has_qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": shape.has_qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,  # Megatron's own default is 0.1
        "hidden_dropout": 0.0,
        # the fused kernel knows no per-row positions, and the calibration branch restarts them
        "apply_rope_fusion": False,
        "bias_activation_fusion": device.has_compiled_fusions(),
        # Megatron's name; the module in that slot is our GatedUnit
        "use_te_activation_func": not device.has_compiled_fusions(),
        "bias_dropout_fusion": device.has_compiled_fusions(),
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "sequence_parallel": sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "perform_initialization": perform_initialization,
        **(_expert_settings(shape) if shape.experts else {}),
    }
    if recompute:
        method = "uniform" if recompute_first_layers is None else "block"
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": recompute_first_layers or 1,
        }
    elif recompute_modules:
        settings |= {"recompute_granularity": "selective", "recompute_modules": list(recompute_modules)}
    return TransformerConfig(**{**settings, **overrides})


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    """Megatron's names for the mixture of experts. No loss for balance: the router is trained by the scores alone,
    as all weights are.
    """
    complete_router()
    device.prepare_experts()
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        # a softmax over the chosen equals all probabilities brought to a sum of one
        "moe_router_pre_softmax": not shape.normalises_experts,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def build_model(
    shape: ModelShape,
    *,
    last_layer: int | None = None,
    dtype: torch.dtype = torch.float32,
    transformer_config: TransformerConfig | None = None,
    has_output: bool = False,
    recompute: bool = False,
    padded_vocab_size: int | None = None,
    use_transformer_engine: bool | None = None,
    lora: LoraSettings | None = None,
) -> HeadRankModel:
    """This rank's part of the model, on this rank's device, its weights not yet loaded.

    ``last_layer`` is l_max: layers above it do not exist and it makes only Q and K. None builds the full depth.
    ``has_output`` adds final norm and output layer (full depth only). ``lora`` adds adapters, undefined as all weights.
    """
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    if last_layer is not None and not 0 <= last_layer < shape.layers:
        raise InputError(
            f"layer {last_layer} does not exist in a model of {shape.layers} layers; were the heads selected on it?"
        )
    config = transformer_config or build_transformer_config(
        shape, tensor_model_parallel_size=tensor_parallel_size, dtype=dtype, recompute=recompute
    )
    check_tensor_parallel_size(shape, tensor_parallel_size)
    config.num_layers = shape.layers if last_layer is None else last_layer + 1
    return HeadRankModel(
        config,
        shape,
        is_truncated=last_layer is not None,
        has_output=has_output,
        padded_vocab_size=padded_vocab_size or shape.padded_vocab(tensor_parallel_size),
        use_transformer_engine=use_transformer_engine,
        lora=lora,
    )


class HeadRankModel(MegatronModule):
    """Token embeddings and decoder layers that give the attention rows of chosen heads instead of logits."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        *,
        is_truncated: bool,
        has_output: bool,
        padded_vocab_size: int,
        use_transformer_engine: bool | None,
        lora: LoraSettings | None,
    ) -> None:
        super().__init__(config=config)
        assert not (is_truncated and has_output), "a truncated model has no output"
        self.lora = lora
        self.shape, self.is_truncated, self.has_output = shape, is_truncated, has_output
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = self.post_process = True  # asked for by Megatron's schedules and gradient finalisation
        self.share_embeddings_and_output_weights = shape.is_tied
        self.vp_stage = None
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = self.pg_collection.tp
        self.padded_vocab_size = padded_vocab_size
        self.readout: ReadoutDelta | None = None
        self.embedding = LanguageModelEmbedding(
            config=config,
            vocab_size=padded_vocab_size,
            max_sequence_length=shape.max_positions,
            position_embedding_type="rope",
            tp_group=self.tp_group,
        )
        has_norm, use_engine = shape.has_qk_norm, use_transformer_engine
        with_experts = {"num_experts": shape.experts or None, "grouped": config.moe_grouped_gemm}
        specs = [
            layer_spec(qk_norm=has_norm, use_transformer_engine=use_engine, lora=lora, **with_experts)
            for _ in range(config.num_layers)
        ]
        if is_truncated:
            specs[-1] = query_key_layer_spec(qk_norm=has_norm, use_transformer_engine=use_engine, lora=lora)
        self.decoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=final_norm(use_transformer_engine)),
            post_process=has_output,
            pg_collection=self.pg_collection,
        )
        for layer in self.decoder.layers:
            # ours recomputes its context itself, without the rows it reads
            layer.self_attention.checkpoint_core_attention = False
        if has_output:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=True,
                skip_weight_param_allocation=shape.is_tied,
                tp_group=self.tp_group,
            )
        # a plain attribute, not a buffer: a bf16 wrapper would round the frequencies
        self.inverse_frequencies = shape.inverse_frequencies().to(device.device())
        self._head_indices: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def heads_on_rank(self) -> range:
        """The Hugging Face numbers of this rank's query heads."""
        count = self.shape.heads // self.tp_group.size()
        return range(self.tp_group.rank() * count, (self.tp_group.rank() + 1) * count)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Part of the pipeline schedule's interface; without pipeline parallelism there is never one."""

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        layout: BranchLayout | LateRows,
        heads_by_layer: Mapping[int, Sequence[int]],
        *,
        is_log_mass: bool = False,
    ) -> CapturedRows | CapturedRatios | CapturedKeys:
        """The rows of the given heads (Hugging Face numbers) that live on this rank. Stops after the deepest layer
        asked for.

        With ``is_log_mass`` the log ratios of their rows; of a late layout always the heads' query vectors and keys.
        Under recomputation what is read is an output of the recomputed region, so it carries gradient all the same.
        """
        self._check_heads(heads_by_layer)
        hidden_SBE = self.embedding(input_ids=input_ids_BS, position_ids=layout.position_ids_BS)
        rotary_SB1D = self._rotary(layout.position_ids_BS)
        found: dict[int, Any] = {}
        for layer in range(max(heads_by_layer) + 1):
            hidden_SBE, rows = self._run_layer(
                layer, hidden_SBE, rotary_SB1D, layout, heads_by_layer.get(layer), is_log_mass
            )
            if rows is not None:
                found[layer] = rows
        if not is_log_mass and not isinstance(layout, LateRows):
            return CapturedRows(found)
        delta = None if self.readout is None else self.readout()
        return CapturedKeys(found, delta) if isinstance(layout, LateRows) else CapturedRatios(found, delta)

    def train_readout(self) -> None:
        """Give the model trained differences of readout weights, zero at first."""
        self.readout = ReadoutDelta(self.config, self.config.num_layers, len(self.heads_on_rank), self.tp_group)

    def logits(self, input_ids_BS: torch.Tensor, layout: BranchLayout) -> torch.Tensor:
        """Logits [B, S, vocabulary] on every rank, padding columns cut off; needs ``has_output``."""
        hidden_SBE = self.embedding(input_ids=input_ids_BS, position_ids=layout.position_ids_BS)
        rotary_SB1D = self._rotary(layout.position_ids_BS)
        for layer in range(self.config.num_layers):
            hidden_SBE, _ = self._run_layer(layer, hidden_SBE, rotary_SB1D, layout, None)
        weight = self.embedding.word_embeddings.weight if self.shape.is_tied else None
        logits_SBV, _ = self.output_layer(self.decoder.final_layernorm(hidden_SBE), weight=weight)
        return logits_SBV.transpose(0, 1)[..., : self.shape.vocab]

    def _run_layer(
        self,
        layer: int,
        hidden_SBE: torch.Tensor,
        rotary_SB1D: torch.Tensor,
        layout: BranchLayout | LateRows,
        heads: Sequence[int] | None,
        is_log_mass: bool = False,
    ) -> tuple[torch.Tensor, LayerRows | torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None]:
        """One decoder layer and the rows of its heads, recomputed in backward when the configuration says so."""
        mine = (
            None if heads is None else [head - self.heads_on_rank.start for head in heads if head in self.heads_on_rank]
        )

        def run(hidden_SBE: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # a capture of its own inside the region: recomputation must not write into the outer one
            capture: RowCapture | LateCapture
            if isinstance(layout, LateRows):
                wanted = {} if mine is None else {layer: mine}
                capture = LateCapture(
                    layout=layout, local_heads_by_layer=wanted, heads_per_group=self.shape.heads // self.shape.groups
                )
            else:
                wanted_index = {} if mine is None else {layer: self._index_of(mine)}
                capture = RowCapture(layout=layout, local_heads_by_layer=wanted_index, is_log_mass=is_log_mass)
            with self._precision(layer):
                output, _ = self.decoder.layers[layer](
                    hidden_states=hidden_SBE, attention_mask=None, rotary_pos_emb=rotary_SB1D, packed_seq_params=capture
                )
            return output, *capture.rows.get(layer, ())

        is_whole = self.config.recompute_method == "uniform" or layer < (self.config.recompute_num_layers or 0)
        if self.config.recompute_granularity == "full" and is_whole and torch.is_grad_enabled():
            output, *rows = checkpoint(run, hidden_SBE, use_reentrant=False, preserve_rng_state=False)
        else:
            output, *rows = run(hidden_SBE)
        if mine is None:
            return output, None
        if isinstance(layout, LateRows):
            return output, (rows[0], rows[1])
        if is_log_mass:
            return output, rows[0]
        return output, LayerRows(tuple(head + self.heads_on_rank.start for head in mine), *rows)

    def _precision(self, layer: int) -> contextlib.AbstractContextManager[Any]:
        """Megatron's FP8 context of a layer, which its TransformerBlock would open; nothing without --fp8-format.

        One for each layer, which is right for every recipe but delayed scaling.
        """
        return get_fp8_context(self.config, layer) if self.config.fp8 else contextlib.nullcontext()

    def _index_of(self, heads: Sequence[int]) -> torch.Tensor:
        """Head numbers on the device; the same few every time, and a copy would wait for the GPU."""
        known = self._head_indices.get(tuple(heads))
        if known is None:
            known = self._head_indices[tuple(heads)] = torch.tensor(
                list(heads), dtype=torch.long, device=self.inverse_frequencies.device
            )
        return known

    def _rotary(self, position_ids_BS: torch.Tensor) -> torch.Tensor:
        """Rotary angles [S, B, 1, D] by position id, so that the calibration branch can restart its positions."""
        angles_SBD = position_ids_BS.t()[..., None].float() * self.inverse_frequencies
        return torch.cat((angles_SBD, angles_SBD), dim=-1)[:, :, None, :]

    def _check_heads(self, heads_by_layer: Mapping[int, Sequence[int]]) -> None:
        """Heads that the model lacks are the caller's mistake; a head below l_max only is fine."""
        assert heads_by_layer, "no heads were asked for"
        assert max(heads_by_layer) < self.config.num_layers, (
            f"layer {max(heads_by_layer)} is above the model's last layer"
        )
