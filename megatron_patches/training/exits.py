"""When to stop early: signals, minutes, iterations. Every rank takes the same decision, in Megatron's order."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron_patches.parallel_scores import largest_on_any_rank
from megatron_patches.training.config import TrainingConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the scheduler's kill, and SLURM's warning before it


class ExitDecision:
    """Remembers signals from the moment it is made; ``reason`` is asked once an iteration."""

    def __init__(self, config: TrainingConfig, device: torch.device, started: float | None = None) -> None:
        """Install the handlers when --exit-signal-handler asks for them. Minutes count from ``started``
        (time.monotonic).
        """
        self.config, self.device, self.started = config, device, time.monotonic() if started is None else started
        self._received = 0
        if config.exit_signal_handler:
            for number in SIGNALS:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # nothing but a note: a handler may run in the middle of a collective, and saving there would deadlock
        self._received = number

    def reason(self, iteration: int) -> str | None:
        """Why the run should save and exit after this iteration, or None."""
        minutes = (time.monotonic() - self.started) / 60
        limit = self.config.exit_duration_in_mins
        flags = torch.tensor([self._received, int(limit is not None and minutes > limit)], device=self.device)
        number, is_late = largest_on_any_rank(flags).tolist()  # one rank's clock or signal decides for all
        if number:
            return f"after receiving {signal.Signals(number).name}"
        if is_late:
            return f"after {minutes:.1f} minutes"
        if self.config.exit_interval is not None and iteration % self.config.exit_interval == 0:
            return f"at iteration {iteration}"
        return None
