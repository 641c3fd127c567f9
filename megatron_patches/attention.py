"""Core attention that also returns a few rows per head, and the last layer's attention that makes only Q and K.

Given to Megatron through the layer spec; nothing is patched. What to read and what was read travel in one
``RowCapture`` of one micro-batch, handed down as ``packed_seq_params``: the argument Megatron passes, untouched, from
the model to the core attention of every layer. Without a capture the module is plain causal attention.

Shapes: S sequence, B batch, P query heads on this rank, G key-value groups on this rank, D head size, K heads asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch.utils.checkpoint import checkpoint

from headrank.method.attention import (
    BranchLayout,
    branched_context,
    causal_context,
    mean_row_probabilities,
    replace_calibration_rows,
)
from headrank.method.log_mass import row_log_ratios
from megatron_patches.late import LateCapture, LateRows


class LayerRows(NamedTuple):
    """What one layer gave on this rank: Hugging Face head numbers, and their averaged rows [B, K, S] in float32.

    ``heads`` may be empty: the rows are then [B, 0, S] but still hang in the autograd graph, so that every rank runs
    the same collectives in backward.
    """

    heads: tuple[int, ...]
    query_rows: torch.Tensor
    calibration_rows: torch.Tensor | None


@dataclass
class RowCapture(PackedSeqParams):
    """Heads to read per layer (zero-based, this rank's own numbering) and, after the forward, their rows.

    With ``is_log_mass`` their log ratios [B, N, K, R] instead. It is a PackedSeqParams in "sbhd" format, so Megatron
    treats the batch as the ordinary padded one that it is.
    """

    qkv_format: str = "sbhd"
    layout: BranchLayout | None = None
    local_heads_by_layer: Mapping[int, Sequence[int] | torch.Tensor] = field(default_factory=dict)
    is_log_mass: bool = False
    rows: dict[int, tuple[torch.Tensor, ...] | tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Stock Megatron's model takes the length of its rotary table from here."""
        if self.layout is not None:
            # Megatron sizes its rotary table by these where packed parameters are given
            self.max_seqlen_q = self.max_seqlen_kv = self.layout.position_ids_BS.shape[1]

    def read(self, layer: int, query_BPSD: torch.Tensor, key_BGSD: torch.Tensor, scale: float) -> None:
        """Keep the averaged rows, or the log ratios, of this layer's heads, if any were asked for."""
        heads = self.local_heads_by_layer.get(layer)
        if heads is None:
            return
        assert self.layout is not None, "rows were asked for without a layout"
        index = torch.as_tensor(heads, dtype=torch.long, device=query_BPSD.device)
        if self.is_log_mass:
            self.rows[layer] = (row_log_ratios(query_BPSD, key_BGSD, self.layout, index, scale),)
        else:
            self.rows[layer] = mean_row_probabilities(query_BPSD, key_BGSD, self.layout, index, scale)


class HeadRankCoreAttention(MegatronModule):
    """Drop-in for Megatron's DotProductAttention: SDPA for the context, explicit rows only for what is captured."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "HeadRank's core attention sees whole sequences only"
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, "attention dropout would make the captured rows differ from the attention used"
        self.layer_number = max(1, layer_number)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.is_recomputed = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )
        self.fused = self._build_fused(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def _build_fused(self, **_: Any) -> torch.nn.Module | None:
        """The module that computes the plain causal context instead of SDPA; none here."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Context [S, B, P*D] of query [S, B, P, D] over key and value [S, B, G, D], causal except in the parallel
        layout.
        """
        capture = packed_seq_params if isinstance(packed_seq_params, (RowCapture, LateCapture)) else None
        if capture is None and packed_seq_params is not None:
            raise NotImplementedError("HeadRank's core attention does not take packed (thd) sequences")
        if capture is not None:
            # layer_number counts from 1 in Megatron, from 0 in heads.json
            capture.read(self.layer_number - 1, query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), self.softmax_scale)
        layout = None if capture is None else capture.layout
        if self.is_recomputed and torch.is_grad_enabled():
            # only the context: rows that were read under recomputation would be read again in backward, without their
            # loss
            return checkpoint(self._context, query, key, value, layout, use_reentrant=False, preserve_rng_state=False)
        return self._context(query, key, value, layout)

    def _context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BranchLayout | LateRows | None
    ) -> torch.Tensor:
        if isinstance(layout, LateRows):
            return layout.rows.context(query, key, value, self.softmax_scale)
        query_BPSD, key_BGSD, value_BGSD = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self._takes_fused(query, layout):
            assert self.fused is not None
            context = self.fused(query, key, value, None, attn_mask_type=AttnMaskType.causal)
            if layout is None or not layout.has_calibration:
                return context
            context = context.reshape(query.shape).permute(1, 2, 0, 3)
            context = replace_calibration_rows(context, query_BPSD, key_BGSD, value_BGSD, layout, self.softmax_scale)
        elif layout is None:
            context = causal_context(query_BPSD, key_BGSD, value_BGSD, self.softmax_scale)
        else:
            context = branched_context(query_BPSD, key_BGSD, value_BGSD, layout, self.softmax_scale)
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _takes_fused(self, query: torch.Tensor, layout: BranchLayout | None) -> bool:
        """Not in float32, for which Transformer Engine has neither flash nor cuDNN attention and makes S x S
        matrices.
        """
        # fused kernels have no float32, and know no mask in which documents do not see each other
        return self.fused is not None and query.dtype != torch.float32 and (layout is None or layout.blocks is None)


class FusedHeadRankCoreAttention(HeadRankCoreAttention):
    """The same with Transformer Engine's fused attention for the causal context; the parallel layout is SDPA's here
    too.
    """

    def _build_fused(self, **arguments: Any) -> torch.nn.Module | None:
        if self.config.attention_backend == AttnBackend.local:
            return None
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention(**arguments)


class QueryKeyAttention(MegatronModule):
    """Layer l_max: queries and keys are made, their rows read, and nothing else exists - no V, no output projection.

    ``linear_qk`` is the fused ``linear_qkv`` without its value rows: group by group the query heads, then the key head.
    ``q_layernorm`` and ``k_layernorm`` keep Megatron's names because their gradients are summed over TP by name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,  # what newer releases of Megatron-Core add, such as the module's name
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = self.pg_collection.tp
        self.head_size = config.kv_channels
        self.softmax_scale = self.head_size**-0.5 if config.softmax_scale is None else config.softmax_scale
        self.num_groups_on_rank = divide(config.num_query_groups, self.tp_group.size())
        self.heads_per_group = divide(config.num_attention_heads, config.num_query_groups)
        self.linear_qk = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            self.head_size * (config.num_attention_heads + config.num_query_groups),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.tp_group,
        )
        norm = {"hidden_size": self.head_size, "config": config, "eps": config.layernorm_epsilon}
        self.q_layernorm = build_module(submodules.q_layernorm, **norm)
        self.k_layernorm = build_module(submodules.k_layernorm, **norm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: RowCapture | LateCapture | None = None,
        **_: Any,
    ) -> None:
        """Read the rows of hidden states [S, B, E] into the capture."""
        mixed, _ = self.linear_qk(hidden_states)
        mixed = mixed.view(*mixed.shape[:2], self.num_groups_on_rank, self.heads_per_group + 1, self.head_size)
        # rows of a fused weight stand group by group: the queries of a group, then its key
        query_SBPD = self.q_layernorm(mixed[..., :-1, :].flatten(2, 3))
        key_SBGD = self.k_layernorm(mixed[..., -1, :])
        if rotary_pos_emb is not None:
            query_SBPD = apply_rotary_pos_emb(
                query_SBPD, rotary_pos_emb, config=self.config, cp_group=self.pg_collection.cp
            )
            key_SBGD = apply_rotary_pos_emb(
                key_SBGD, rotary_pos_emb, config=self.config, cp_group=self.pg_collection.cp
            )
        if packed_seq_params is not None:
            query_BPSD, key_BGSD = query_SBPD.permute(1, 2, 0, 3), key_SBGD.permute(1, 2, 0, 3)
            packed_seq_params.read(self.layer_number - 1, query_BPSD, key_BGSD, self.softmax_scale)
