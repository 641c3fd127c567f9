"""The log-mass score: how the attention of weighted heads on a passage becomes one number. Pure tensor functions.

Shapes: U queries, B batch, K heads, R query rows, N passages, S sequence, T tokens of a passage. A row's *log sum* is
the log-sum-exp of its attention logits over a passage's tokens: the logarithm of the passage's attention mass, up to
the row's normaliser. It is always compared with the log sum over the prompt's opening in the same row, which every
layout has; the normaliser drops out of the difference, so that no list and no other passage enters a passage's value.

Trap: never take the logarithm of a mass. Masses underflow in float32, and a floor put under them would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from headrank.errors import InputError

KINDS = ("mass", "log-mass")


@dataclass(frozen=True)
class Readout:
    """How the values of a HeadSet's heads become a score; ``weights`` and ``offsets`` are in the order of its heads.

    ``kind`` mass is Eq. 1, log-mass the mean over query rows of log(exp(passage - opening - c_h) + floor), with the log
    sums of one row. ``floor`` 0 is the plain difference. ``fit`` says how the weights were found, and on what.
    """

    kind: Literal["mass", "log-mass"] = "log-mass"
    weights: tuple[float, ...] = ()
    is_calibrated: bool = False
    floor: float = 0.0
    offsets: tuple[float, ...] = ()
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"readout: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not (0.0 <= self.floor < math.inf):
            raise InputError(f"readout: floor {self.floor!r} must be a number of at least 0")
        for name in ("weights", "offsets"):
            if not all(math.isfinite(value) for value in getattr(self, name)):
                raise InputError(f"readout: {name} must be finite numbers")
        if self.is_calibrated and self.kind == "log-mass":
            raise InputError("readout: a log-mass score is not calibrated; set is_calibrated to false or kind to mass")
        if self.floor and self.kind == "mass":
            raise InputError("readout: a floor belongs to the log-mass score; set floor to 0")

    def check_count(self, num_heads: int) -> None:
        """Raise InputError unless there is a weight for every head, and an offset for every head or none at all."""
        if len(self.weights) != num_heads:
            raise InputError(f"readout: {len(self.weights)} weights for {num_heads} heads")
        if self.offsets and len(self.offsets) != num_heads:
            raise InputError(f"readout: {len(self.offsets)} offsets for {num_heads} heads")

    @property
    def identity(self) -> dict[str, Any]:
        """What cache keys and reference keys are made of: everything that changes a score."""
        return {
            "kind": self.kind,
            "weights": list(self.weights),
            "is_calibrated": self.is_calibrated,
            "floor": self.floor,
            "offsets": list(self.offsets),
        }

    def to_dict(self) -> dict[str, Any]:
        """The readout as plain values, for heads.json."""
        return {**self.identity, "fit": dict(self.fit)}

    @classmethod
    def from_dict(cls, values: Any) -> Readout:
        """The inverse of ``to_dict`` with every field checked."""
        if not isinstance(values, Mapping):
            raise InputError(f"field 'readout' must be an object, found {values!r}")
        unknown = sorted(set(values) - {"kind", "weights", "is_calibrated", "floor", "offsets", "fit"})
        if unknown:
            raise InputError(f"readout: unknown field {unknown[0]!r}; was this file written by a newer headrank?")
        if type(values.get("is_calibrated")) is not bool or not isinstance(values.get("fit"), Mapping):
            raise InputError("readout: 'is_calibrated' must be true or false and 'fit' an object")
        return cls(
            kind=values.get("kind"),  # type: ignore[arg-type]  # checked by __post_init__
            weights=_numbers("weights", values.get("weights")),
            is_calibrated=values["is_calibrated"],
            floor=_numbers("floor", [values.get("floor")])[0],
            offsets=_numbers("offsets", values.get("offsets")),
            fit=values["fit"],
        )


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or not all(type(value) in (int, float) for value in values):
        raise InputError(f"readout: {name!r} must hold numbers, found {str(values)[:60]}")
    return tuple(float(value) for value in values)


def segment_log_sums(logits: torch.Tensor, segment_of_token_BS: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Log-sum-exp of logits [B, K, R, S] over the tokens of each segment: float32 [B, N, K, R], -inf where there is no
    token.

    ``segment_of_token_BS`` holds ``num_segments`` where a token is in none. Masked logits (-inf) add nothing.
    Differentiable.
    """
    logits = logits.float()
    # one scatter over all segments: a loop over documents would launch hundreds of kernels per layer
    index = segment_of_token_BS[:, None, None, :].expand(logits.shape)
    lowest = logits.new_full((*logits.shape[:-1], num_segments + 1), -math.inf)
    with torch.no_grad():  # the shift by the maximum cancels, also in the gradient
        highest = lowest.scatter_reduce(-1, index, logits, "amax")
        highest = torch.where(highest.isfinite(), highest, torch.zeros_like(highest))
    sums = torch.zeros_like(lowest).scatter_add(-1, index, (logits - highest.gather(-1, index)).exp())
    has_mass = sums > 0
    # log of 1 where there is nothing, then -inf: the gradient of log(0) would poison all others
    logs = torch.where(has_mass, sums, torch.ones_like(sums)).log() + highest
    return logs.masked_fill(~has_mass, -math.inf)[..., :num_segments].permute(0, 3, 1, 2).contiguous()


def row_values(
    log_sums: torch.Tensor, opening: torch.Tensor, offsets: torch.Tensor | None = None, floor: float = 0.0
) -> torch.Tensor:
    """One row's value of a passage, log(exp(passage - opening - c_h) + floor): [..., N, K, R] from log sums of that
    shape.

    ``opening`` [..., K, R] is the log sum over the opening in the same rows, ``offsets`` [K] the c_h. Passages come
    before heads and rows, so that every sum below runs over contiguous numbers: then no other passage changes how it is
    rounded.
    """
    values = log_sums.float() - opening.float().unsqueeze(-3)
    if offsets is not None:
        values = values - offsets.float()[:, None]
    if floor == 0.0:
        return values
    # logaddexp has no gradient at -inf (an empty passage); the clamp keeps exp(-80) = 0 there and changes nothing else
    return torch.logaddexp(values.clamp_min(-80.0), values.new_tensor(math.log(floor)))


def mean_over_rows(values: torch.Tensor, weights_R: torch.Tensor | None = None) -> torch.Tensor:
    """s_h of a passage: the mean over query rows, [..., N, K] from [..., N, K, R].

    ``weights_R`` [..., R] sums to one over the rows that count and is 0 for padding, whatever the values there are.
    """
    if weights_R is None:
        return values.mean(-1)
    # where() and not a product: padding rows may hold -inf, and -inf times 0 is NaN
    weights = weights_R.float()[..., None, None, :]
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum(-1)


def weighted_sum(values: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Scores [..., N] = sum over heads of w_h s_h from values [..., N, K], in float32 also under autocast.

    Trap: these are sums of large numbers of both signs. Under autocast a matrix product of them comes out in bfloat16
    and ranks by rounding; that is why this is an elementwise product outside autocast.
    """
    with torch.autocast(values.device.type, enabled=False):
        return (values.float() * weights_K.float()).sum(-1)
