"""Whether the files of a model fit together: configuration, weights, tokenizer, adapter, heads. Reads files only,
imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrank.doctor.finding import Finding, Findings, split_error
from headrank.errors import InputError
from headrank.files import read_json
from headrank.reranking import shipped_readouts
from headrank.reranking.model_sources import EMBEDDED, base_of, is_adapter_folder, read_adapter_config


def look_at_model(model: str, heads: str | None = None) -> list[Finding]:
    """The findings on one model and the heads it would be read with; nothing is downloaded."""
    findings = Findings("model")
    folder = _folder_of(findings, model, heads)
    if heads in shipped_readouts.NAMES:
        heads = str(shipped_readouts.shipped_path(str(heads)))
    if folder is not None:
        try:
            _look_at_folder(findings, folder, heads)
        except InputError as error:
            findings.problem(*split_error(str(error)))
    return findings.found


def _folder_of(findings: Findings, model: str, heads: str | None) -> Path | None:
    """Where the model's files lie now, or None with the reason said."""
    if model == EMBEDDED:
        is_trained = heads is None or heads in shipped_readouts.TRAINED
        return shipped_readouts.ADAPTER if is_trained else _embedded_folder(findings)
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        findings.problem(f"{model}: no such folder", "give a Hugging Face directory, a hub name or 'embedded'")
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    if isinstance(cached, str):
        findings.ok(f"{model} is in the cache of the hub")
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE:
        findings.problem(
            f"{model} is not in the cache and HF_HUB_OFFLINE is set",
            f"unset it, or run 'hf download {model}' where there is a network",
        )
    else:
        findings.note(f"{model} is not on this machine; it is downloaded on first use")
    return None


def _embedded_folder(findings: Findings) -> Path | None:
    from headrank.reranking.embedded_model import MODEL_NAME, cache_directory, find_damage

    folder = cache_directory() / "models" / MODEL_NAME
    if not folder.is_dir():
        findings.note(
            "the embedded model is not in the cache yet; it is downloaded (93 MB) from the package index on first use"
        )
        return None
    damage = find_damage(folder)
    if damage:
        findings.note(f"the embedded model: {damage}; it is made again on next use")
        return None
    findings.ok(f"the embedded model is complete in {folder}")
    return folder


def _look_at_folder(findings: Findings, folder: Path, heads: str | None) -> None:
    """Everything in a model's folder; a missing configuration ends the look."""
    base = _base_folder(findings, folder) if is_adapter_folder(folder) else folder
    if base is None:
        return
    config = _config_of(findings, base)
    if config is None:
        return
    layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    shape = f"{config.get('model_type')}, {layers} layers, {num_heads} heads, vocabulary {config.get('vocab_size')}"
    findings.ok(f"{base}: {shape}", layers=layers, heads=num_heads)
    _check_weights(findings, base)
    _check_tokenizer(findings, base, config)
    _check_heads(findings, folder, heads, config)


def _base_folder(findings: Findings, folder: Path) -> Path | None:
    """Where the base model of an adapter lies; None, with the reason said, where it is not here."""
    ours = read_json(folder / "headrank.json") if (folder / "headrank.json").is_file() else {}
    named = ours.get("base") if isinstance(ours, dict) else None
    if EMBEDDED in (named, named or read_adapter_config(folder).get("base_model_name_or_path")):
        return _embedded_folder(findings)
    base = base_of(folder)
    if not Path(base).is_dir():
        findings.note(f"a PEFT adapter on {base}, which is no folder here; it is downloaded on first use")
        return None
    findings.ok(f"a PEFT adapter on {base}")
    return Path(base)


def _config_of(findings: Findings, folder: Path) -> dict[str, Any] | None:
    """The decoder's own part of config.json."""
    path = folder / "config.json"
    remedy = "copy or export the model again; it needs config.json, tokenizer.json and *.safetensors"
    if not path.is_file():
        findings.problem(f"{path} is missing", remedy)
        return None
    values = read_json(path)
    text = values.get("text_config", values) if isinstance(values, dict) else None
    if not isinstance(text, dict) or not {"num_hidden_layers", "num_attention_heads"} <= text.keys():
        findings.problem(f"{path} is not a decoder's configuration", remedy)
        return None
    return text


def _check_weights(findings: Findings, folder: Path) -> None:
    """Every file that the index names is there and as long as its header says."""
    index = folder / "model.safetensors.index.json"
    values = read_json(index) if index.is_file() else None
    names = set(values.get("weight_map", {}).values()) if isinstance(values, dict) else {"model.safetensors"}
    remedy = "copy or export the model again"
    for name in sorted(names):
        path = folder / str(name)
        if not path.is_file():
            if list(folder.glob("pytorch_model*.bin")):
                findings.note(
                    f"{folder}: weights in pytorch_model.bin; safetensors would load faster and only as deep as needed"
                )
            else:
                findings.problem(f"{path} is missing", remedy)
            return
        expected = _safetensors_bytes(path)
        if expected != path.stat().st_size:
            found = (
                "is not a safetensors file"
                if expected is None
                else f"has {path.stat().st_size} bytes, its header says {expected}"
            )
            findings.problem(f"{path} {found}", remedy)
            return
    findings.ok(f"weights are complete ({len(names)} file{'s' if len(names) > 1 else ''})")


def _safetensors_bytes(path: Path) -> int | None:
    """The length that a safetensors header promises, or None where there is no such header."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(path.stat().st_size, 100_000_000):
            return None
        try:
            header = json.loads(stream.read(length))
            return (
                8
                + length
                + max(
                    (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None


def _check_tokenizer(findings: Findings, folder: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer reads words, and makes no id that the model has no embedding for."""
    if not (folder / "tokenizer.json").is_file():
        findings.problem(
            f"{folder / 'tokenizer.json'} is missing",
            "copy it from the base model, or save the tokenizer with transformers",
        )
        return
    from headrank.reranking.plain_tokenizer import PlainTokenizer

    tokenizer = PlainTokenizer.read(folder)
    if tokenizer is None:
        findings.note("the tokenizer's settings need transformers to read them")
        return
    if not tokenizer("relevant", add_special_tokens=False)["input_ids"]:
        findings.problem(f"{folder / 'tokenizer.json'} knows no words", "copy it from the base model")
    elif len(tokenizer) > int(config.get("vocab_size") or len(tokenizer)):
        says = (
            f"the tokenizer has {len(tokenizer)} entries, the model {config['vocab_size']} embeddings: they are not "
            "of one model"
        )
        findings.problem(says, "copy tokenizer.json from the base model")
    else:
        template = "with" if tokenizer.chat_template else "without"
        findings.ok(f"tokenizer of {len(tokenizer)} entries, {template} a chat template")


def _check_heads(findings: Findings, folder: Path, heads: str | None, config: Mapping[str, Any]) -> None:
    """The heads lie in the layers that are there, and belong to a model of this size."""
    if heads == "all":
        findings.ok("heads: all of them, as ICR")
        return
    document = read_json(heads) if heads else _exported_heads(folder)
    place = heads or str(folder / "headrank.json")
    if document is None:
        remedy = "give --heads FILE, made by 'headrank select-heads', or --heads all"
        findings.problem(f"{folder}: no headrank.json beside this model, so it has no heads", remedy)
        return
    pairs = document.get("heads") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(pairs, list) or not pairs or not all(map(_is_head, pairs)):
        findings.problem(f"{place}: holds no heads", "make it again with 'headrank select-heads'")
        return
    layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    source = int(config.get("headrank_source_layers", layers))
    deepest = max(layer for layer, _ in pairs)
    if deepest >= source or max(head for _, head in pairs) >= num_heads or document.get("num_heads") != num_heads:
        size = f"{document.get('num_layers')} layers of {document.get('num_heads')} heads"
        says = f"{place}: the heads are of a model with {size}, this one has {source} of {num_heads}"
        findings.problem(says, "select heads on this model: 'headrank select-heads'")
    elif deepest >= layers:
        findings.problem(
            f"{place}: a head is in layer {deepest}, this export has {layers}",
            "export the checkpoint again with these heads",
        )
    else:
        prompt = document.get("prompt")
        layout = prompt.get("document_layout", "sequential") if isinstance(prompt, dict) else "unknown"
        read = f"layers 0-{deepest} of {source} are computed"
        findings.ok(
            f"{len(pairs)} heads by {document.get('method')}, {layout} layout; {read}",
            heads=len(pairs),
            layers_used=deepest + 1,
        )


def _is_head(value: Any) -> bool:
    """Whether this is a [layer, head] pair."""
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def _exported_heads(folder: Path) -> Any:
    """The heads that headrank.json holds, as they stand there; None without the file."""
    path = folder / "headrank.json"
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: not an export's description; export the model again with 'headrank export-hf'")
    return values.get("heads")
