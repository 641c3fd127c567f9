"""What a low-rank adapter is: rank, scale and the projections it changes. Shared by training, export and reranking;
pure.

The weight of an adapted projection is W + (alpha / rank) B A, with A [rank, inputs] and B [outputs, rank].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrank.errors import InputError

# The projections of a decoder layer by their Hugging Face names, and the module that holds each.
PROJECTIONS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


@dataclass(frozen=True)
class LoraSettings:
    """An adapter's rank, alpha and projections (in the order of PROJECTIONS)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(PROJECTIONS)

    def __post_init__(self) -> None:
        assert self.rank > 0 and self.targets and set(self.targets) <= set(PROJECTIONS), self

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    @property
    def flags(self) -> str:
        """The flags of pretrain_headrank.py that say the same."""
        targets = "" if self.targets == tuple(PROJECTIONS) else f" --headrank-lora-targets {' '.join(self.targets)}"
        return f"--headrank-lora-rank {self.rank} --headrank-lora-alpha {self.alpha:g}{targets}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> LoraSettings | None:
        """The inverse; None stays None."""
        return None if values is None else cls(int(values["rank"]), float(values["alpha"]), ordered(values["targets"]))


def ordered(targets: Any) -> tuple[str, ...]:
    """Projections without repetition, in the order of PROJECTIONS; an unknown one is an InputError."""
    unknown = sorted(set(targets) - set(PROJECTIONS))
    if unknown:
        raise InputError(f"projection {unknown[0]!r} cannot be adapted; the ones that can: {', '.join(PROJECTIONS)}")
    return tuple(name for name in PROJECTIONS if name in set(targets))
