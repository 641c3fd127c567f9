"""How a flag is written down as data: its name, and what argparse is told."""

from __future__ import annotations

from typing import Any

Flag = tuple[str, dict[str, Any]]


def value(name: str, kind: type, default: Any, text: str, **more: Any) -> Flag:
    """A flag with a value; the help text ends with the default where there is one."""
    shown = "" if default is None else f" (default {default})"
    return name, {
        "type": kind,
        "default": default,
        "help": text + shown,
        **({"metavar": "N"} if kind is int else {}),
        **more,
    }


def switch(name: str, text: str) -> Flag:
    """A flag that is there or not."""
    return name, {"action": "store_true", "help": text}
