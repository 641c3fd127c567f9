"""Low-rank adapters (LoRA) on Megatron's fused, tensor-parallel linear layers; the base weights are frozen.

Every Hugging Face projection has a pair of its own, also where Megatron fuses several (QKV, gate and up), so that what
is trained is a plain PEFT adapter. An adapted linear layer is the same class with a child ``adapter``; its parameters
are ``adapter.q_proj_lora_A`` and so on. Under tensor parallelism:

- column-parallel (QKV, gate and up): A is replicated, B is cut by outputs. The low-rank hidden values pass through a
  copy region (identity forward, sum backward), so A's gradient is whole and the same on every rank.
- row-parallel (output projection, down): A is cut by inputs, B is replicated. The hidden values are summed over ranks
  forward; B sees them whole, so its gradient is whole too.
- with sequence parallelism the replicated half sees only this rank's part of the sequence. It is marked as Megatron's
  norms are, and Megatron sums its gradient over ranks.

Shapes: S sequence, B batch, R rank, I inputs, O outputs on this rank.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide, unwrap_model

from headrank.lora_settings import PROJECTIONS, LoraSettings
from megatron_patches import device

# A Megatron linear layer -> the projections fused in it, in order
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_qk": ("q_proj", "k_proj"),  # the last layer of a truncated model; on disk it has the name of a whole one
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
CUT_BY_INPUTS = ("o_proj", "down_proj")
_NETWORK = ("embedding.", "decoder.", "output_layer.")  # what a base model has
_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(?:self_attention|mlp)\.\w+\.adapter\.(\w+)_(lora_[AB])")


def adapter_parameter(name: str) -> tuple[int, str, str] | None:
    """(layer, projection, "lora_A" or "lora_B") of an adapter's parameter, None for any other name."""
    match = _PARAMETER.fullmatch(name)
    return None if match is None else (int(match.group(1)), match.group(2), match.group(3))


def adapter_name(layer: int, projection: str, factor: str) -> str:
    """The name on disk of an adapter's parameter."""
    fused = next(linear for linear, projections in FUSED.items() if projection in projections)
    part = "mlp" if PROJECTIONS[projection] == "mlp" else "self_attention"
    return f"decoder.layers.{layer}.{part}.{fused}.adapter.{projection}_{factor}"


def adapted(linear: Any, name: str, settings: LoraSettings | None) -> Any:
    """What stands in the spec's slot ``name`` (a key of FUSED): the linear class itself where none of its
    projections is adapted.
    """
    projections = FUSED[name]
    if settings is None or not set(projections) & set(settings.targets):
        return linear
    return ModuleSpec(module=_adapted_class(linear), params={"lora": settings, "projections": projections})


@functools.cache
def _adapted_class(linear: type) -> type:
    """The linear class with an adapter; one class for each, so that specs can be compared."""
    return type(
        f"Adapted{linear.__name__}", (_AdaptedLinear, linear), {"__doc__": f"{linear.__name__} with an adapter."}
    )


class _AdaptedLinear:
    """Put in front of one of Megatron's linear classes: W x + bias becomes W x + bias + (alpha / rank) B A x."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        lora: LoraSettings,
        projections: Sequence[str],
        **more: Any,
    ) -> None:
        super().__init__(input_size, output_size, config=config, **more)  # type: ignore[call-arg]
        self.adapter = FusedAdapter(config, input_size, lora, projections, more["tp_group"])

    def forward(self, input_: torch.Tensor, *more: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Megatron's (output, bias)."""
        # the base's own forward: its collectives and its fused kernels stay as they are
        output, bias = super().forward(input_, *more, **options)  # type: ignore[misc]
        return output + self.adapter(input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The linear layer's own entries, and the adapter's as the adapter cuts them."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        # the base class would describe the adapter as replicated; its cut factor is sharded
        own = {name: entry for name, entry in state.items() if not name.startswith(f"{prefix}adapter.")}
        return own | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)


class FusedAdapter(MegatronModule):
    """The pairs of one fused linear layer, lora_A [R, I on this rank] and lora_B [O, R]; gives what is added to its
    output.

    The factors are this module's own parameters and not those of children: with --overlap-param-gather Megatron waits
    for a parameter when the module that owns it is called.
    """

    def __init__(
        self, config: TransformerConfig, input_size: int, lora: LoraSettings, projections: Sequence[str], tp_group: Any
    ) -> None:
        super().__init__(config=config)
        self.tp_group, self.scale, self.projections = tp_group, lora.scale, tuple(projections)
        self.cut_by_inputs = self.projections[0] in CUT_BY_INPUTS
        size = tp_group.size()
        # Q, K and V are interleaved group by group, gate and up stand one after the other
        self.num_groups = divide(config.num_query_groups, size) if "q_proj" in self.projections else 1
        inputs = divide(input_size, size) if self.cut_by_inputs else input_size
        self.outputs = {
            name: divide(_output_size(config, name), 1 if self.cut_by_inputs else size) for name in self.projections
        }
        for name in self.projections:
            if name in lora.targets:
                self._make_pair(name, lora.rank, inputs)

    def _make_pair(self, name: str, rank: int, inputs: int) -> None:
        made = {"device": device.device(), "dtype": self.config.params_dtype}
        low, high = (
            torch.nn.Parameter(torch.empty(shape, **made)) for shape in ((rank, inputs), (self.outputs[name], rank))
        )
        cut, whole = (low, high) if self.cut_by_inputs else (high, low)
        # The marks decide whose gradient counts once in the norm, and whose is summed over the parts of the sequence.
        set_tensor_model_parallel_attributes(cut, True, 1 if self.cut_by_inputs else 0, 1)
        whole.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter(f"{name}_lora_A", low)
        self.register_parameter(f"{name}_lora_B", high)

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The adapted projections with their A and B."""
        own = self._parameters
        return {
            name: (own[f"{name}_lora_A"], own[f"{name}_lora_B"]) for name in self.projections if f"{name}_lora_A" in own
        }

    def forward(self, input_SBI: torch.Tensor) -> torch.Tensor:
        """[S, B, O], the parts of projections without an adapter zero."""
        pairs = self.pairs()
        hidden_SBR = self._across_ranks(F.linear(input_SBI, torch.cat([low for low, _ in pairs.values()]))) * self.scale
        # one product for the A's of all projections: they read the same input
        parts = hidden_SBR.chunk(len(pairs), dim=-1)
        made = {name: F.linear(part, high) for (name, (_, high)), part in zip(pairs.items(), parts, strict=True)}
        if len(self.projections) == 1:
            return made[self.projections[0]]
        leading = next(iter(made.values()))
        whole = [
            made[name] if name in made else leading.new_zeros(*leading.shape[:-1], self.outputs[name])
            for name in self.projections
        ]
        return torch.cat([part.unflatten(-1, (self.num_groups, -1)) for part in whole], dim=-1).flatten(-2)

    def _across_ranks(self, hidden: torch.Tensor) -> torch.Tensor:
        """The low-rank values, whole where B needs them; see the head of this file for the gradients."""
        if self.tp_group.size() == 1:
            return hidden
        if self.config.sequence_parallel:
            if self.cut_by_inputs:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
            return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        if self.cut_by_inputs:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """A and B of every projection, one of them cut over ranks: any tensor-parallel size reads what any other
        wrote.
        """
        factor, axis = ("lora_A", 1) if self.cut_by_inputs else ("lora_B", 0)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {f"{name}_{factor}": axis for name in self.pairs()},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _output_size(config: TransformerConfig, projection: str) -> int:
    """Rows of a projection's weight in the whole model."""
    assert config.kv_channels is not None and config.num_query_groups is not None and config.ffn_hidden_size is not None
    if projection == "q_proj":
        return config.num_attention_heads * config.kv_channels
    if projection in ("k_proj", "v_proj"):
        return config.num_query_groups * config.kv_channels
    return config.ffn_hidden_size if projection in ("gate_proj", "up_proj") else config.hidden_size


def freeze_base(model: torch.nn.Module) -> None:
    """Of the network only adapters are trained: Megatron then makes neither gradient buffers nor optimizer state for
    the base.
    """
    for name, parameter in model.named_parameters():
        if name.startswith(_NETWORK) and adapter_parameter(name) is None:
            parameter.requires_grad_(False)


@torch.no_grad()
def reset_adapters(model: torch.nn.Module, seed: int) -> None:
    """A uniform in +-1/sqrt(inputs), as PEFT draws it, and B zero: the model starts as its base.

    Every pair has a seed of its own and is drawn whole on the CPU, so the start does not depend on the sizes of the
    job.
    """
    bare = unwrap_model(model)
    rank, size = bare.tp_group.rank(), bare.tp_group.size()
    for name, parameter in bare.named_parameters():
        place = adapter_parameter(name)
        if place is None:
            continue
        layer, projection, factor = place
        # zero, so that the first forward is the base's to the last bit, and the reference scores are the base's
        if factor == "lora_B":
            parameter.zero_()
            continue
        inputs = parameter.shape[1] * (size if projection in CUT_BY_INPUTS else 1)
        digest = hashlib.sha256(f"{seed}/{layer}/{projection}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        # drawn whole and then cut: each rank drawing its own part would give another start for every tensor-parallel
        # size
        whole = torch.empty(parameter.shape[0], inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        parameter.copy_(whole.chunk(size, dim=1)[rank] if projection in CUT_BY_INPUTS else whole)
