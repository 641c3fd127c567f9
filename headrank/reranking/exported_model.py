"""The directory of an exported reranker: what lies beside the weights, how it appears at once, how its heads are
exchanged.

A Hugging Face model directory with two files more: headrank.json (heads, prompt, how it was trained) and a model card.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrank.artifacts import atomic_folder
from headrank.errors import InputError
from headrank.files import read_json, write_json
from headrank.method.heads import HeadSet
from headrank.reranking.model_card import model_card
from headrank.reranking.model_sources import is_adapter_folder

FORMAT = "headrank/1"
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


def read_headrank_json(model: str | Path) -> dict[str, Any] | None:
    """The headrank.json beside an exported model, or None for any other model."""
    path = Path(model) / "headrank.json"
    if not path.is_file():
        return None
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise InputError(f"{path}: not a {FORMAT} file; export the model again with 'headrank export-hf'")
    return values


def require_exported(model: str | Path) -> dict[str, Any]:
    """The headrank.json of an exported model; any other folder is an InputError."""
    about = read_headrank_json(model)
    if about is None:
        raise InputError(
            f"`model` {model}: has no headrank.json; give the folder of an exported model, or `output` FILE"
        )
    return about


def keep_relevance(model: str | Path, curve: Mapping[str, Any]) -> None:
    """Put a curve from score to relevance into a headrank.json; other heads, written over it, take it away again."""
    write_json(Path(model) / "headrank.json", {**require_exported(model), "relevance": dict(curve)})


def write_headrank_files(
    directory: Path,
    heads: HeadSet,
    training: Mapping[str, Any],
    *,
    name: str,
    base: Path,
    base_name: str,
    num_bytes: int,
    is_truncated: bool = False,
    adapted: str | None = None,
) -> None:
    """headrank.json and README.md; ``base`` is the model that was trained, whose license goes into the card.

    ``adapted`` says that the directory holds an adapter only, and where HeadRank finds the model that it changes.
    """
    shown = {**heads.to_dict(), "model": Path(heads.model).name if os.path.isabs(heads.model) else heads.model}
    about = {"format": FORMAT, "heads": shown, "is_truncated": is_truncated, "training": dict(training)}
    write_json(directory / "headrank.json", about if adapted is None else {"base": adapted, **about})
    card = model_card(
        name,
        base_name,
        heads,
        is_truncated=is_truncated,
        is_adapter=adapted is not None,
        training=training,
        license_name=_license_of(base),
        num_bytes=num_bytes,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def _license_of(base: Path) -> str | None:
    """The license line of the base model's own card, if it has one."""
    card = base / "README.md"
    if not card.is_file():
        return None
    for line in card.read_text(encoding="utf-8", errors="replace").splitlines()[:100]:
        if line.startswith("license:"):
            return line.removeprefix("license:").strip() or None
    return None


def copy_companions(source: Path, directory: Path, *, can_generate: bool) -> None:
    """Tokenizer, license and, for a model that still writes text, how it does so."""
    for pattern in (*_COMPANIONS, "generation_config.json") if can_generate else _COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)


def check_output(output: Path, can_overwrite: bool, sources: Mapping[str, Path]) -> None:
    """Refuse what must not be replaced: files, what is there already, and whatever holds a source (name of its
    parameter -> path).
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"`output` {output}: is a file; give the name of a directory")
    if output.exists() and any(output.iterdir()) and not can_overwrite:
        raise InputError(f"`output` {output}: already exists; remove it, choose another or give `overwrite`")
    for name, source in sources.items():
        if output.resolve() in (source.resolve(), *source.resolve().parents):
            raise InputError(
                f"`output` {output}: holds {name} {source}, which would be removed; choose another directory"
            )


def write_failed(output: Path, error: OSError) -> InputError:
    """The line for a disk that takes no more."""
    return InputError(f"`output` {output}: cannot be written ({error.strerror or error}); make room or choose another")


def check_prompt(heads: HeadSet, trained: HeadSet | None, place: str) -> None:
    """A trained model reads the prompt it was trained with; heads that were chosen with another are refused."""
    if trained is not None and trained.prompt.hash != heads.prompt.hash:
        raise InputError(
            f"`heads`: chosen with another prompt ({heads.prompt.hash}) than {place} was trained with "
            f"({trained.prompt.hash}); "
            "select them with 'select-heads --prompt-of DIR', DIR an export of this training without `heads`"
        )


def replace_heads(
    exported: Path,
    heads: HeadSet | None,
    output: Path,
    *,
    name: str,
    base: Path,
    base_name: str,
    can_overwrite: bool = False,
) -> HeadSet:
    """Write an exported model again with other heads (None: its own): the same weights, another headrank.json and
    card.
    """
    about = read_headrank_json(exported)
    if about is None:
        raise InputError(
            f"`exported` {exported}: has no headrank.json, so 'headrank export-hf' did not write it; give `checkpoint`"
        )
    heads = heads or HeadSet.from_dict({"table": [], **about["heads"]})
    check_prompt(heads, HeadSet.from_dict({"table": [], **about["heads"]}), str(exported))
    config = read_json((base if is_adapter_folder(exported) else exported) / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{exported / 'config.json'}: not a model's configuration; export the model again")
    layers = int(config["num_hidden_layers"])
    heads.check_fits(
        int(config.get("headrank_source_layers", layers)), int(config["num_attention_heads"]), str(exported)
    )
    if heads.l_max >= layers:
        raise InputError(
            f"`exported` {exported}: was cut to {layers} layers, but a head is in layer {heads.l_max}; give "
            "`checkpoint`"
        )
    check_output(output, can_overwrite, {"`exported`": exported, "`base`": base})
    try:
        with atomic_folder(output) as partial:
            shutil.copytree(exported, partial, dirs_exist_ok=True)
            num_bytes = sum(path.stat().st_size for path in partial.glob("*.safetensors"))
            write_headrank_files(
                partial,
                heads,
                about["training"],
                name=name,
                base=base,
                base_name=base_name,
                is_truncated=bool(about["is_truncated"]),
                adapted=about.get("base"),
                num_bytes=num_bytes,
            )
    except OSError as error:
        raise write_failed(output, error) from error
    return heads
