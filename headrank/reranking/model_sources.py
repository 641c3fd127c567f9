"""Where a model comes from: 'embedded', a Hugging Face directory, an adapter's folder, or a name on the hub.

Python and the commands ask here. An adapter's folder names the base model it was trained on; ``base_of`` finds it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from headrank.errors import InputError, first_line
from headrank.files import read_json

EMBEDDED = "embedded"
ADAPTER_CONFIG = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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


def reranker_from_hub(name: str) -> str:
    """The local folder of a repository on the hub (or in its cache) that holds headrank.json; any other model's name
    as it is.
    """
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        return name
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(name, "headrank.json")
        return snapshot_download(name)
    except (
        OSError,
        HfHubHTTPError,
        HFValidationError,
        ValueError,
    ):  # no heads there, or no such repository: loading will tell
        return name


def load_tokenizer(model: str | Path, name: str) -> Any:
    """The tokenizer of a model or of an adapter's base; ``name`` is how the caller knows it, for the message."""
    from transformers import AutoTokenizer

    require_tokenizer_reader(base_of(model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_of(model))
    except InputError:
        raise
    except Exception as error:  # damaged files raise whatever their parser raises
        raise InputError(
            f"{name}: no tokenizer that can be loaded ({first_line(error)}); give a directory with tokenizer.json, "
            "a hub name or 'embedded'"
        ) from error
    require_words(tokenizer, name)
    return tokenizer


def require_tokenizer_reader(folder: str) -> None:
    """tokenizer.model alone (older Mistral and Llama) is converted by transformers, which needs sentencepiece for
    it.
    """
    is_older = (Path(folder) / "tokenizer.model").is_file() and not (Path(folder) / "tokenizer.json").is_file()
    if is_older and importlib.util.find_spec("sentencepiece") is None:
        raise InputError(
            f"{folder}: brings tokenizer.model only, which needs the package sentencepiece: pip install sentencepiece"
        )


def require_words(tokenizer: Any, name: str) -> None:
    """Refuse an empty tokenizer: transformers makes one, without a word about it, where files are missing."""
    if not tokenizer("relevant", add_special_tokens=False)["input_ids"]:
        raise InputError(f"{name}: the tokenizer knows no words; is tokenizer.json missing?")


def is_adapter_folder(model: str | Path) -> bool:
    """Whether this is a local PEFT adapter."""
    return (Path(model) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json as a dictionary."""
    values = read_json(folder / ADAPTER_CONFIG)
    if not isinstance(values, dict):
        raise InputError(f"{folder / ADAPTER_CONFIG}: not an adapter's configuration")
    return values


def base_of(model: str | Path) -> str:
    """The model that an adapter's folder changes, as transformers can load it; any other model itself.

    ``base`` in headrank.json comes before the name in adapter_config.json: it can say 'embedded', which other programs
    do not know.
    """
    if not is_adapter_folder(model):
        return str(model)
    folder = Path(model)
    ours = read_json(folder / "headrank.json") if (folder / "headrank.json").is_file() else {}
    named = ours.get("base") if isinstance(ours, dict) else None
    name = str(named or read_adapter_config(folder).get("base_model_name_or_path") or "")
    if name == EMBEDDED:
        return resolve_model(name)
    beside = folder / name
    found = (
        str(beside)
        if name and not os.path.isabs(name) and beside.is_dir() and beside.resolve() != folder.resolve()
        else name
    )
    if not name or (os.path.isabs(name) and not Path(name).is_dir()) or is_adapter_folder(found):
        raise InputError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path {name!r} is not a model; write there a directory, "
            "a hub name or 'embedded'"
        )
    return found
