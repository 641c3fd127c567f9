"""Weights and switches of the training objective: which are the paper's and which are ours. No torch, so --help can import it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrank.errors import InputError

OBJECTIVES = ("headrank", "ranknet")
SCALINGS = ("constant", "standardise", "max-min")
DEFAULT_SCALES = {"constant": 10.0, "standardise": 1.0, "max-min": 4.0}  # ours: each brings |s+ - s-| to about 1


@dataclass(frozen=True)
class LossSettings:
    """Weights of the objective. A weight of zero removes its term (the ablations w/o Omega and w/o prox)."""

    objective: str = "headrank"  # "ranknet" is the paper's "w/ SFT": -log sigmoid alone, no anchor, no regulariser
    scaling: str = "constant"  # ours
    scale: float = 10.0  # ours
    margin: float = 1.0  # m, ours
    linear_weight: float = 0.05  # alpha, the paper's
    proximal_weight: float = 0.05  # beta, the paper's
    entropy_weight: float = 0.01  # gamma, ours
    variance_weight: float = 0.01  # eta, ours
    temperature: float = 1.0  # of p = softmax(s / T), ours

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"loss: objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.scaling not in SCALINGS:
            raise InputError(f"loss: scaling {self.scaling!r} is not one of {', '.join(SCALINGS)}")
        for name in ("scale", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"loss: {name} {getattr(self, name)} must be finite and above 0")
        for name in ("margin", "linear_weight", "proximal_weight", "entropy_weight", "variance_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"loss: {name} {getattr(self, name)} must be finite and not negative")

    @property
    def needs_reference(self) -> bool:
        """Whether the objective looks at the frozen model at all."""
        return self.objective == "headrank" and self.proximal_weight > 0
