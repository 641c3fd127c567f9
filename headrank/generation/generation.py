"""Greedy chat answers for the generative baseline: from a local Hugging Face model, or from an OpenAI-compatible
endpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, GenerationConfig

from headrank.errors import InputError
from headrank.http_json import RefusedRequest, post_json
from headrank.method.prompt import control_tokens, neutralise
from headrank.model_config import load_config
from headrank.placement import resolve_device
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.reader import load_complete

TOKENS_PER_IDENTIFIER = 8  # "[20] > " is at most this long in the tokenizers we know


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and the tokens read and written for it (0 where the server does not say)."""

    text: str
    num_tokens: int


class Generator(Protocol):
    """Anything that answers chats."""

    def fits(self, messages: Sequence[Message], num_identifiers: int) -> bool:
        """Whether prompt and answer fit the model's context."""

    def generate(self, prompts: Sequence[Sequence[Message]], num_identifiers: int) -> list[Answer]:
        """One greedy answer a prompt, long enough for a ranking of ``num_identifiers`` passages."""


class LocalGenerator:
    """A Hugging Face chat model: batched greedy decoding with a key-value cache, thinking off."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 1,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """``max_new_tokens`` replaces the length that follows from the number of identifiers."""
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"{model.config._name_or_path}: the tokenizer has no chat template; RankGPT needs a chat model"
            )
        self.model, self.tokenizer, self.batch_size, self.max_new_tokens = model, tokenizer, batch_size, max_new_tokens
        self.max_length = max_length or getattr(
            model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        self.special_tokens = control_tokens(tokenizer)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **options: Any,
    ) -> LocalGenerator:
        """Load a directory or hub name at full depth; an export that left layers out cannot write."""
        model = resolve_model(model)
        config = load_config(model).get_text_config(decoder=True)
        source_layers = getattr(config, "headrank_source_layers", None)
        if source_layers and source_layers > config.num_hidden_layers:
            raise InputError(
                f"{model}: holds {config.num_hidden_layers} of {source_layers} layers; RankGPT needs a full export"
            )
        if dtype == "int8":
            raise InputError("RankGPT writes in a float format; `dtype` int8 is for methods that read attention")
        device, dtype = resolve_device(device, None if dtype == "auto" else dtype)
        tokenizer, loaded = load_complete(AutoModelForCausalLM, model, "chat model", dtype=dtype)
        return cls(loaded.to(device).eval(), tokenizer, **options)

    def _room_for_answer(self, num_identifiers: int) -> int:
        return self.max_new_tokens or TOKENS_PER_IDENTIFIER * num_identifiers

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered chat. Control tokens inside passages are broken, so that a passage cannot end
        its turn.
        """
        cleaned = [replace(message, content=neutralise(message.content, self.special_tokens)) for message in messages]
        try:
            text = self.render(cleaned)
        except TemplateError:  # templates without a system turn (Gemma): its words open the first user turn
            first, second, *rest = cleaned
            text = self.render([Message("user", f"{first.content}\n\n{second.content}"), *rest])
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text, up to where the model's answer begins."""
        return self.tokenizer.apply_chat_template(
            [vars(message) for message in messages], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def fits(self, messages: Sequence[Message], num_identifiers: int) -> bool:
        """Whether prompt and answer stay within ``max_length``."""
        return (
            self.max_length is None
            or len(self._encode(messages)) + self._room_for_answer(num_identifiers) <= self.max_length
        )

    def generate(self, prompts: Sequence[Sequence[Message]], num_identifiers: int) -> list[Answer]:
        """Greedy answers, ``batch_size`` prompts of similar length at a time."""
        encoded = [self._encode(messages) for messages in prompts]
        answers: list[Answer | None] = [None] * len(encoded)
        by_length = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        for start in range(0, len(by_length), self.batch_size):
            chosen = by_length[start : start + self.batch_size]
            for index, answer in zip(
                chosen, self._generate([encoded[index] for index in chosen], num_identifiers), strict=True
            ):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    @torch.inference_mode()
    def _generate(self, batch: Sequence[list[int]], num_identifiers: int) -> list[Answer]:
        """One left-padded batch; sampling settings that came with the model are not used."""
        longest = max(map(len, batch))
        own = self.model.generation_config
        pad = (
            self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id or 0
        )
        input_ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in batch], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch], device=self.model.device)
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self._room_for_answer(num_identifiers),
            eos_token_id=own.eos_token_id if own.eos_token_id is not None else self.tokenizer.eos_token_id,
            pad_token_id=pad,
        )
        output = self.model.generate(input_ids=input_ids, attention_mask=mask, generation_config=greedy)[
            :, longest:
        ].tolist()
        texts = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return [
            Answer(text, len(ids) + sum(token != pad for token in new))
            for text, ids, new in zip(texts, batch, output, strict=True)
        ]


class EndpointGenerator:
    """The /chat/completions of an OpenAI-compatible server; the key, if the server wants one, is in OPENAI_API_KEY."""

    def __init__(
        self,
        api_base: str,
        model: str,
        *,
        concurrency: int = 4,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        timeout: float = 600.0,
        retries: int = 5,
    ) -> None:
        """``api_base`` is the address up to and with /v1. ``max_length`` is not known of a server; give fewer words
        instead.
        """
        if not api_base.startswith(("http://", "https://")):
            raise InputError(f"`api_base` {api_base!r} must begin with http:// or https:// (and usually ends in /v1)")
        if max_length is not None:
            raise InputError("max_length cannot be checked at an endpoint; cut the passages with `max_words` instead")
        self.url, self.model, self.concurrency = f"{api_base.rstrip('/')}/chat/completions", model, max(1, concurrency)
        self.max_new_tokens, self.timeout, self.retries = max_new_tokens, timeout, retries
        # vLLM and SGLang switch thinking off with it; a server that refuses it is asked again without
        self.extra: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}

    def fits(self, messages: Sequence[Message], num_identifiers: int) -> bool:
        """Always: the server's tokenizer is not at hand, and it says so itself when a prompt is too long."""
        return True

    def generate(self, prompts: Sequence[Sequence[Message]], num_identifiers: int) -> list[Answer]:
        """Ask the server, ``concurrency`` prompts at a time."""
        limit = self.max_new_tokens or TOKENS_PER_IDENTIFIER * num_identifiers
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda messages: self._ask(messages, limit), prompts))

    def _ask(self, messages: Sequence[Message], limit: int) -> Answer:
        body = {
            "model": self.model,
            "messages": [vars(message) for message in messages],
            "temperature": 0,
            "max_tokens": limit,
            "stream": False,
        }
        reply = self._post(body)
        try:
            text = reply["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{self.url}: the answer is no chat completion: {json.dumps(reply)[:200]}") from None
        usage = reply.get("usage") or {}
        return Answer(text, int(usage.get("total_tokens") or 0))

    def _post(self, body: dict[str, Any]) -> Any:
        """Send until the server answers; a refusal of what not every server knows is no refusal of the question."""
        extra = self.extra
        try:
            return post_json(
                self.url,
                {**body, **extra},
                key=os.environ.get("OPENAI_API_KEY"),
                timeout=self.timeout,
                retries=self.retries,
            )
        except RefusedRequest as refusal:
            if refusal.status not in (400, 422) or not extra or "chat_template_kwargs" not in str(refusal):
                raise
            self.extra = {}
            return self._post(body)
