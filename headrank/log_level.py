"""How much the commands say: HEADRANK_LOG in the environment."""

from __future__ import annotations

import logging
import os

from headrank.errors import InputError


def log_level() -> str:
    """One of logging's names; INFO unless HEADRANK_LOG says otherwise."""
    level = os.environ.get("HEADRANK_LOG", "INFO")
    if not isinstance(logging.getLevelName(level), int):
        raise InputError(
            f"HEADRANK_LOG {level!r} in the environment is not a level; use DEBUG, INFO, WARNING or ERROR, or unset it"
        )
    return level
