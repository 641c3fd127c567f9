"""PEFT adapter folders (adapter_config.json, adapter_model.safetensors): read without peft, merged into weights, and
written.

Only plain LoRA is read; whatever else peft can write changes the model in another way and is refused by name. Modules
are named from the layers on ("layers.3.self_attn.q_proj"), as the plain decoder names its weights.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.errors import InputError
from headrank.files import write_json
from headrank.lora_settings import PROJECTIONS, LoraSettings
from headrank.reranking.model_sources import ADAPTER_CONFIG, is_adapter_folder, read_adapter_config

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?:.*\.)?(layers\.\d+\..+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
# settings of peft that change what an adapter computes, and the value that plain LoRA has
_PLAIN: dict[str, Any] = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
    "trainable_token_indices": None,
    "use_qalora": False,
    "target_parameters": None,
}
_BASE_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter: module -> (A [rank, inputs], B [outputs, rank]), and the factor of the product for each rank."""

    folder: Path
    base_name: str
    alpha: float
    is_rank_stabilised: bool
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def read(cls, folder: str | Path) -> PeftAdapter:
        """Everything of the folder; a setting or a tensor that is not plain LoRA is an InputError that names it."""
        folder = Path(folder)
        config = read_adapter_config(folder)
        for name, plain in _PLAIN.items():
            value = config.get(name, plain)
            if value != plain and value:
                raise InputError(
                    f"{folder / ADAPTER_CONFIG}: {name} is {value!r}, only plain LoRA is read here; merge it with "
                    "peft first"
                )
        start = str(config.get("init_lora_weights", True)).partition("_")[0]
        if start in _BASE_CHANGING_STARTS:
            raise InputError(
                f"{folder / ADAPTER_CONFIG}: init_lora_weights {start!r} also changes the base model; merge it with "
                "peft first"
            )
        if config.get("peft_type") != "LORA":
            raise InputError(
                f"{folder / ADAPTER_CONFIG}: peft_type {config.get('peft_type')!r} is not read here, only 'LORA'"
            )
        try:
            alpha, is_stabilised = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{folder / ADAPTER_CONFIG}: lora_alpha {config.get('lora_alpha')!r} is not a number"
            ) from error
        return cls(
            folder, str(config.get("base_model_name_or_path") or ""), alpha, is_stabilised, _read_factors(folder)
        )

    def scale(self, rank: int) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a module (named from the layers on) with its adapter, in float32; itself where there is
        none.
        """
        pair = self.factors.get(name)
        if pair is None:
            return weight
        low, high = (factor.to(device=weight.device).float() for factor in pair)
        if (high.shape[0], low.shape[1]) != tuple(weight.shape):
            raise InputError(
                f"{self.folder}: the adapter of {name!r} is for a weight [{high.shape[0]}, {low.shape[1]}], the "
                "base model's is "
                f"{list(weight.shape)}; was it trained on another model?"
            )
        # in place: new pages for the product, its multiple and the sum would take twice as long
        return (high @ low).mul_(self.scale(low.shape[0])).add_(weight)

    def settings(self) -> LoraSettings:
        """Rank, alpha and projections, for training to go on; an adapter of several ranks cannot be trained here."""
        ranks = {low.shape[0] for low, _ in self.factors.values()}
        if len(ranks) != 1:
            raise InputError(f"{self.folder}: has ranks {sorted(ranks)}; training takes one rank for all projections")
        places = [_LAYER.fullmatch(name) for name in self.factors]
        targets = {place.group(2) for place in places if place is not None}
        if None in places or not targets <= set(PROJECTIONS):
            raise InputError(
                f"{self.folder}: adapts more than {', '.join(PROJECTIONS)}; such an adapter cannot be trained on "
                "Megatron"
            )
        rank = ranks.pop()
        return LoraSettings(rank, self.scale(rank) * rank, tuple(name for name in PROJECTIONS if name in targets))

    def below(self, num_layers: int) -> set[str]:
        """The modules of the first layers."""
        return {name for name in self.factors if int(name.split(".")[1]) < num_layers}


def _read_factors(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> (A, B); every A has its B and ranks agree."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise InputError(f"{path}: is not there; save the adapter as safetensors (peft's default)")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or export the adapter again") from error
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError(f"{path}: tensor {key!r} is not LoRA's of a decoder layer; merge it with peft first")
        found[match.group(1)][match.group(2)] = tensor
    for name, pair in found.items():
        if (
            set(pair) != {"A", "B"}
            or pair["A"].dim() != 2
            or pair["B"].dim() != 2
            or pair["A"].shape[0] != pair["B"].shape[1]
        ):
            raise InputError(
                f"{path}: {name!r} has no pair of matrices lora_A and lora_B of one rank; copy or export the "
                "adapter again"
            )
    return {name: (pair["A"], pair["B"]) for name, pair in sorted(found.items())}


@lru_cache(maxsize=4)
def _read_once(folder: Path, modified: int) -> PeftAdapter:
    """The adapter of a folder as it was at that time."""
    return PeftAdapter.read(folder)


def adapter_of(model: str | Path) -> PeftAdapter | None:
    """The adapter of a local adapter folder, None for any other model."""
    folder = Path(model)
    if not is_adapter_folder(folder):
        return None
    weights = folder / WEIGHTS_NAME
    return _read_once(folder, weights.stat().st_mtime_ns if weights.is_file() else 0)


def merge_weights(
    model: str | Path, weights: Iterable[tuple[str, torch.Tensor]], num_layers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of an adapter folder's base (names from the layers on), merged in float32; those of any other model
    as they are.

    An adapter of a module that the base does not have below ``num_layers`` is an InputError.
    """
    adapter = adapter_of(model)
    if adapter is None:
        yield from weights
        return
    pending = adapter.below(num_layers)
    for name, weight in weights:
        module = name.removesuffix(".weight")
        pending.discard(module)
        yield name, adapter.merged(module, weight) if name.endswith(".weight") else weight
    _refuse_strange(model, pending)


def merge_into(model: str | Path, loaded: torch.nn.Module, num_layers: int) -> None:
    """The same in place, for a model that transformers loaded in float32."""
    adapter = adapter_of(model)
    if adapter is None:
        return
    pending = adapter.below(num_layers)
    for name, module in loaded.named_modules():
        name = name[name.find("layers.") :] if "layers." in name else name
        if name in pending:
            module.weight.data = adapter.merged(name, module.weight.detach())  # type: ignore[union-attr]
            pending.discard(name)
    _refuse_strange(model, pending)


def _refuse_strange(model: str | Path, unseen: set[str]) -> None:
    if unseen:
        raise InputError(
            f"{model}: adapts {min(unseen)!r}, which its base model does not have; was it trained on another model?"
        )


def write_adapter(
    folder: Path, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], settings: LoraSettings, *, base_name: str
) -> None:
    """An adapter for a model of the CausalLM kind, as peft would save it. ``factors`` are named from the layers on."""
    from safetensors.torch import save_file

    tensors = {}
    for name, pair in factors.items():
        for letter, factor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.model.{name}.lora_{letter}.weight"] = factor.contiguous()
    config = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": settings.alpha if settings.alpha % 1 else int(settings.alpha),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": target_pattern(factors),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    write_json(folder / ADAPTER_CONFIG, config)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    # safetensors lets nobody else read its files
    (folder / WEIGHTS_NAME).chmod((folder / ADAPTER_CONFIG).stat().st_mode)


def target_pattern(modules: Iterable[str]) -> str:
    """A pattern for exactly these modules: the last layer that is read has fewer than the others, and those above it
    none.
    """
    layers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    by_layer: dict[str, list[str]] = defaultdict(list)
    for name in modules:
        _, layer, module = name.split(".", 2)
        by_layer[layer].append(module)
    for layer, names in by_layer.items():
        layers[tuple(sorted(names))].append(layer)
    parts = [rf"(?:{'|'.join(numbers)})\.(?:{'|'.join(map(re.escape, names))})" for names, numbers in layers.items()]
    return rf"(?:.*\.)?layers\.(?:{'|'.join(parts)})"
