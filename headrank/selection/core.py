"""CoRe heads: the contrastive softmax over uncalibrated masses, without the entropy gate.

Its own code uses temperature 0.001 (0.1 for Llama and Phi), one positive document and hard negatives a query
(``Contrast`` irrelevant), and can prune upper layers before detection. Scoring with the chosen heads is calibrated, as
for every attention method here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrank.selection.selection import TEMPERATURE, Contrast, EntropySelection


class CoreSelection(EntropySelection):
    """Mean S_disc over every d+ (Eq. 2 alone); the gate is neither used nor shown."""

    name, top_k = "core", 8

    def __init__(
        self, temperature: float = TEMPERATURE, is_calibrated: bool = False, contrast: Contrast | None = None
    ) -> None:
        """``temperature`` is CoRe's t; calibrated masses are not its definition, only a switch for experiments."""
        super().__init__(temperature, entropy_weight=0.0, is_calibrated=is_calibrated, contrast=contrast)

    def settings(self) -> dict[str, Any]:
        """Temperature, the kind of mass and the contrast."""
        return {"temperature": self.temperature, "is_calibrated": self.is_calibrated} | self.contrast.settings()

    def columns(self) -> dict[str, np.ndarray]:
        """S alone."""
        return {"S": self.scores.value(self.wanted)}
