"""Weights and switches of the training objective: which are the paper's and which are ours. No torch, so --help can
import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrank.errors import InputError

OBJECTIVES = ("headrank", "ranknet", "teacher")
SCALINGS = ("constant", "standardise", "max-min")
DEFAULT_SCALES = {"constant": 10.0, "standardise": 1.0, "max-min": 4.0}  # ours: each brings |s+ - s-| to about 1
# ours: of the mean log mass of heads with equal weights; fitted weights bring their own scale
EQUAL_LOG_MASS_SCALE = 4.0
_PREFERENCE_WEIGHTS = ("margin", "linear_weight", "proximal_weight", "entropy_weight", "variance_weight")
_TEACHER_WEIGHTS = ("teacher_ranknet_weight", "teacher_listwise_weight", "teacher_margin_weight")


@dataclass(frozen=True)
class LossSettings:
    """Weights of the objective. A weight of zero removes its term (the ablations w/o Omega and w/o prox)."""

    # "ranknet" is the paper's "w/ SFT": -log sigmoid alone; "teacher" is no preference loss at all
    objective: str = "headrank"
    scaling: str = "constant"  # ours
    scale: float = 10.0  # ours
    margin: float = 1.0  # m, ours
    linear_weight: float = 0.05  # alpha, the paper's
    proximal_weight: float = 0.05  # beta, the paper's
    entropy_weight: float = 0.01  # gamma, ours
    variance_weight: float = 0.01  # eta, ours
    temperature: float = 1.0  # of p = softmax(s / T), ours
    # L_prox on list-centred scores, for scores that leave a free offset per list (late layout)
    is_proximal_centred: bool = False
    teacher_ranknet_weight: float = 0.0  # terms of headrank/method/distillation.py
    teacher_listwise_weight: float = 0.0
    teacher_margin_weight: float = 0.0
    in_batch_weight: float = 0.0  # of in_batch.py's contrastive term; late layout only
    teacher_temperature: float = 1.0  # divides the teacher's scores, to bring them to the scale of logits

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"loss: objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.scaling not in SCALINGS:
            raise InputError(f"loss: scaling {self.scaling!r} is not one of {', '.join(SCALINGS)}")
        for name in ("scale", "temperature", "teacher_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"loss: {name} {getattr(self, name)} must be finite and above 0")
        for name in (*_PREFERENCE_WEIGHTS, *_TEACHER_WEIGHTS, "in_batch_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"loss: {name} {getattr(self, name)} must be finite and not negative")
        if self.in_batch_weight > 0 and self.scaling != "constant":
            raise InputError(
                f"loss: scaling {self.scaling!r} has no meaning across lists; use constant with the in-batch term"
            )
        if self.objective == "teacher" and not self.needs_teacher:
            raise InputError(
                "loss: the objective 'teacher' is the teacher's terms alone, and all of their weights are 0; raise one"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the objective looks at the frozen model at all."""
        return self.objective == "headrank" and self.proximal_weight > 0

    @property
    def needs_pairs(self) -> bool:
        """Whether a context must have preference pairs to have a loss."""
        return self.objective != "teacher"

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's scores are looked at."""
        return any(getattr(self, name) > 0 for name in _TEACHER_WEIGHTS)
