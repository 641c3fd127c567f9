"""Where a model comes from: 'embedded', a Hugging Face directory, or a name on the hub. Python and the commands ask here."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"


def is_embedded(model: str | Path) -> bool:
    """Whether this is the embedded model, by name or by the folder that the name resolves to. Fetches nothing."""
    from headrank.reranking.embedded_model import MANIFEST_NAME, MODEL_NAME

    path = Path(model)
    return str(model) == EMBEDDED or (path.name == MODEL_NAME and (path / MANIFEST_NAME).is_file())


def resolve_model(name: str | Path) -> str:
    """A path or hub name that transformers can load; 'embedded' is fetched into the user's cache on first use.

    A folder of that name does not hide the embedded model; give ``./embedded`` to mean the folder.
    """
    if str(name) != EMBEDDED:
        return str(name)
    from headrank.reranking.embedded_model import embedded_model_directory

    return str(embedded_model_directory())
