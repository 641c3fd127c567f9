"""One truncated prefill of a Hugging Face decoder, read for the attention of chosen heads.

AttentionReader owns the model and the encoder; rerankers and head selection are policies on top of what it reads. Only
the layers up to the deepest head are loaded, and the forward leaves from inside that layer once Q and K are made.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrank.errors import InputError, first_line
from headrank.method.attention import batch_contexts
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import EncodedContext, PromptEncoder
from headrank.model_config import load_config, text_config, truncate_config
from headrank.placement import describe, fastest_float, resolve_device
from headrank.reranking.capture import Capture, ExitEarly, register
from headrank.reranking.decoder import Decoder, load_decoder
from headrank.reranking.decoder_files import DecoderShape, refuse_incomplete
from headrank.reranking.model_sources import (
    base_of,
    is_adapter_folder,
    require_tokenizer_reader,
    require_words,
    resolve_model,
)
from headrank.reranking.peft_folder import merge_into
from headrank.reranking.plain_tokenizer import PlainTokenizer

_log = logging.getLogger(__name__)
_SMALLEST_FOR_BFLOAT16 = 80e6  # bytes of weights; converting numbers costs a smaller model more than it gains


class AttentionReader:
    """A decoder whose attention can be read; made with ``load``."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        prompt: PromptTemplate,
        name: str,
        num_layers: int,
        max_length: int | None,
    ) -> None:
        """``num_layers`` is the depth of the whole model; ``model`` may hold fewer layers."""
        self.model, self.tokenizer, self.name, self.num_layers = model, tokenizer, name, num_layers
        self.config = text_config(model.config)
        self.num_heads = int(self.config.num_attention_heads)
        self.loaded_layers = int(self.config.num_hidden_layers)
        self.encoder = PromptEncoder(tokenizer, prompt, max_length)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        prompt: PromptTemplate | None = None,
        last_layer: int | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_length: int | None = None,
    ) -> AttentionReader:
        """Load a directory or hub name; with ``last_layer`` the layers above it are not even read from the file.

        ``dtype`` may be "auto" (the fastest float format of the device) or "int8" (integer weights, on the CPU).
        """
        model, asked, is_int8 = resolve_model(model), dtype, dtype == "int8"
        is_auto = dtype == "auto" or (dtype is None and prompt is not None and prompt.is_late)
        # int8 weights are made from float32 ones: rounded to bfloat16 first they would be rounded twice
        device, dtype = resolve_device(device, "float32" if is_int8 else None if is_auto else dtype)
        reason = ""
        if is_auto or (asked is None and device.type == "cuda"):
            dtype, reason = fastest_float(device, dtype, is_large=_bytes_of(model) >= _SMALLEST_FOR_BFLOAT16)
        _log.info(describe(device, "int8" if is_int8 else str(dtype).removeprefix("torch."), reason, dtype))
        tokenizer, loaded, num_layers = _load_plain(model, last_layer, dtype) or _load_with_transformers(
            model, last_layer, dtype
        )
        if is_int8:
            loaded = _in_int8(model, loaded, device)
        limit = getattr(text_config(loaded.config), "max_position_embeddings", None)
        return cls(
            loaded.to(device).eval(), tokenizer, prompt or PromptTemplate(), str(model), num_layers, max_length or limit
        )

    def use_prompt(self, prompt: PromptTemplate) -> None:
        """Change the template without loading the model again."""
        self.encoder = PromptEncoder(self.tokenizer, prompt, self.encoder.max_length)

    @torch.inference_mode()
    def read(
        self,
        contexts: Sequence[EncodedContext],
        heads_by_layer: Mapping[int, Sequence[int]],
        *,
        stop_early: bool = True,
        reads: Collection[str] = ("mass",),
    ) -> Capture:
        """Forward a batch and return the rows of the heads asked for, stopping inside the deepest of their layers.

        ``reads`` names what is wanted of them: "mass" (averaged rows), "log-mass" (log ratios), or both.
        """
        deepest = max(heads_by_layer)
        if deepest >= self.loaded_layers:
            raise InputError(
                f"{self.name}: layer {deepest} was asked for, but only {self.loaded_layers} layers are loaded"
            )
        input_ids_BS, layout = batch_contexts(contexts, self.tokenizer.pad_token_id or 0, self.device)
        capture = Capture(layout, heads_by_layer, deepest if stop_early else None, frozenset(reads))
        try:
            self.model(input_ids=input_ids_BS, position_ids=layout.position_ids_BS, use_cache=False, headrank=capture)
        # the normal end: the deepest wanted layer raises it from inside its attention, so that nothing above is
        # computed
        except ExitEarly:
            pass
        # transformers falls back to its own attention without a word; then no row was captured, and no score may be
        # made up
        missing = set(heads_by_layer) - set(capture.query_rows or capture.log_ratios)
        if missing:
            raise InputError(
                f"{self.name}: this architecture does not call the registered attention (layer {min(missing)} was "
                "never seen)"
            )
        return capture


def _bytes_of(model: str | Path) -> int:
    """The size of a local model's weights; 0 for a name on the hub."""
    return sum(path.stat().st_size for path in Path(base_of(model)).glob("*.safetensors"))


def _in_int8(model: str | Path, loaded: Any, device: torch.device) -> Decoder:
    """The same decoder with integer weights; refused where there is no kernel for it."""
    if device.type != "cpu":
        raise InputError(f"dtype 'int8' runs on the CPU, not on {device}; give bfloat16")
    if not isinstance(loaded, Decoder):
        raise InputError(
            f"{model}: dtype 'int8' needs a local model of the Llama, Mistral, Qwen2 or Qwen3 family; give bfloat16"
        )
    from headrank.reranking.int8 import quantise

    return quantise(loaded)


def _load_plain(model: str | Path, last_layer: int | None, dtype: torch.dtype) -> tuple[Any, Any, int] | None:
    """Tokenizer, decoder and depth of a local model of the usual shape, without transformers; None for any other."""
    shape = DecoderShape.read(model)
    tokenizer = PlainTokenizer.read(model) if shape else None
    if shape is None or tokenizer is None:
        return None
    require_words(tokenizer, str(model))
    num_layers = shape.num_hidden_layers
    if last_layer is not None and last_layer >= num_layers:
        raise InputError(f"layer {last_layer} was asked for, but the model has only {num_layers} layers")
    return (
        tokenizer,
        load_decoder(model, shape, num_layers if last_layer is None else last_layer + 1, dtype),
        num_layers,
    )


def _load_with_transformers(model: str | Path, last_layer: int | None, dtype: torch.dtype) -> tuple[Any, Any, int]:
    """Tokenizer, decoder and depth of everything that transformers can load."""
    from transformers import AutoModel

    text = text_config(load_config(model))
    num_layers = int(text.num_hidden_layers)
    if last_layer is not None:
        truncate_config(text, last_layer + 1)
    tokenizer, loaded = load_complete(
        AutoModel, model, "decoder model", config=text, dtype=dtype, attn_implementation=register()
    )
    return tokenizer, loaded, num_layers


def load_complete(auto: Any, model: str | Path, kind: str, **options: Any) -> tuple[Any, Any]:
    """The tokenizer and the model of a transformers Auto class, whole or not at all: transformers would invent what
    the files lack.
    """
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    source, dtype = base_of(model), options.pop("dtype", None)
    is_adapted = is_adapter_folder(model)
    require_tokenizer_reader(source)
    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(source)
            # ignore_mismatched_sizes lets transformers load what fits: the mismatches are then reported by name below
            options["dtype"] = torch.float32 if is_adapted else dtype  # an adapter is added before anything is rounded
            loaded, report = auto.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{model}: cannot be loaded as a {kind} ({first_line(error)}); are its files complete?"
        ) from error
    refuse_incomplete(model, {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    require_words(tokenizer, str(model))
    if is_adapted:
        merge_into(model, loaded, int(text_config(loaded.config).num_hidden_layers))
        for parameter in loaded.parameters():  # not loaded.to(dtype): that would round the rotary frequencies too
            parameter.data = parameter.data.to(dtype)
    return tokenizer, loaded


class quiet_loading:
    """Silence transformers' loading report: the untouched upper layers are *meant* to be missing from the model."""

    def __enter__(self) -> None:
        import transformers

        self.level = transformers.logging.get_verbosity()
        self.bar = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        import transformers

        transformers.logging.set_verbosity(self.level)
        if self.bar:
            transformers.logging.enable_progress_bar()
