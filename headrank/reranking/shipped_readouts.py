"""The readouts of the embedded model that come with the package: heads.json files in readouts/, each with how it was fitted.

``full`` reads every layer, ``fast`` at most 20 of 30 and 16 (layer, key-value group) pairs. docs/readouts.md has the commands that
make them; a new file in the folder replaces an old one.
"""

from __future__ import annotations

from pathlib import Path

from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.reranking.model_sources import is_embedded

FOLDER = Path(__file__).parent / "readouts"
NAMES = ("full", "fast")
DEFAULT = "full"


def shipped_path(name: str) -> Path:
    """The file of a shipped readout."""
    return FOLDER / f"{name}.json"


def shipped_readout(name: str, model: str | Path) -> HeadSet:
    """The readout of that name; an InputError for any other model than the embedded one, whose heads it weighs."""
    if not is_embedded(model):
        raise InputError(
            f"heads {name!r} are a readout of the embedded model, not of {model}; fit one with 'headrank select-heads --method readout' "
            f"(a file of that name is ./{name})"
        )
    return HeadSet.load(shipped_path(name))
