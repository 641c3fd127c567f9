"""What the package brings for the embedded model: an adapter that training made, and readouts with and without it.

``full`` and ``fast`` read the trained model: the embedded one with the adapter in embedded/adapter. ``untrained-full``
and ``untrained-fast`` read the embedded model as it is. ``fast`` ones read at most 20 of 30 layers and 16 (layer,
key-value group) pairs. ``fast`` is the default: on held-out lists it is as good as ``full``, and a passage store of it
is a quarter as large. configs/readouts.yaml and configs/teacher.yaml make them; a new file replaces an old one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrank.errors import InputError
from headrank.reranking.model_sources import EMBEDDED, is_embedded, reranker_from_hub, resolve_model

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet

FOLDER = Path(__file__).parent / "embedded"
ADAPTER = FOLDER / "adapter"
TRAINED = ("full", "fast")
UNTRAINED = ("untrained-full", "untrained-fast")
NAMES = TRAINED + UNTRAINED
DEFAULT = "fast"


def shipped_path(name: str) -> Path:
    """The file of a shipped readout."""
    return FOLDER / "readouts" / f"{name}.json"


def model_to_read(model: str | Path, heads: HeadSet | str | Path | None) -> str:
    """The model that is read with these heads: a path or hub name.

    'embedded' with a readout of the trained model, or with nothing said, is the trained model. With any other heads it
    is the embedded model as it is, on which they were selected. A reranker on the hub is fetched whole: its heads lie
    beside its weights.
    """
    is_trained = heads is None or (isinstance(heads, str) and heads in TRAINED)
    return str(ADAPTER) if is_trained and str(model) == EMBEDDED else reranker_from_hub(resolve_model(model))


def files(name: str | None) -> list[Path]:
    """What a shipped readout is read from, for whoever asks whether it changed; nothing for any other name."""
    return [shipped_path(name), *([ADAPTER] if name in TRAINED else [])] if name in NAMES else []


def is_shipped_adapter(model: str | Path) -> bool:
    """Whether this is the trained embedded model."""
    return Path(model).absolute() == ADAPTER.absolute()


def shipped_readout(name: str, model: str | Path) -> HeadSet:
    """The readout of that name; an InputError for a model that it does not weigh."""
    fits = str(model) == EMBEDDED or (is_shipped_adapter(model) if name in TRAINED else is_embedded(model))
    if not fits:
        raise InputError(
            f"heads {name!r} are a readout of the embedded model, not of {model}; fit one with 'headrank "
            "select-heads --method readout' "
            f"(a file of that name is ./{name})"
        )
    from headrank.method.heads import HeadSet  # imports torch

    return HeadSet.load(shipped_path(name))
