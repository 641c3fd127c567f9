"""A tokenizer.json with its chat template, without importing transformers: what the prompt needs and nothing more.

The ids are those of transformers' fast tokenizers, which wrap the same file; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.reranking.model_sources import base_of

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PlainTokenizer:
    """The part of transformers' tokenizer interface that encoding prompts uses; made with ``read``."""

    is_fast = True

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any], chat_template: str | None) -> None:
        """``tokenizer`` is a tokenizers.Tokenizer, ``settings`` the content of tokenizer_config.json."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self.chat_template = tokenizer, chat_template
        self.special_tokens = {role: text for role in _ROLES if (text := _token_text(settings.get(role)))}
        extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
        self._extra = [
            text for value in (extra.values() if isinstance(extra, Mapping) else extra) if (text := _token_text(value))
        ]
        self.added_tokens_decoder: dict[int, Any] = tokenizer.get_added_tokens_decoder()

    @classmethod
    def read(cls, model: str | Path) -> PlainTokenizer | None:
        """The tokenizer of a local directory; None where its settings ask for more than tokenizer.json says."""
        from tokenizers import Tokenizer

        folder = Path(base_of(model))
        try:
            settings = _json(folder / "tokenizer_config.json")
            marked = _json(folder / "special_tokens_map.json")
            template = folder / "chat_template.jinja"
            chat = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
        except (OSError, ValueError):
            return None  # transformers names what is wrong with such a file
        if not isinstance(chat, str | None) or any(
            settings.get(key) for key in ("add_bos_token", "add_eos_token", "auto_map")
        ):
            return None
        try:
            return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), {**marked, **settings}, chat)
        except Exception as error:
            raise InputError(
                f"{folder / 'tokenizer.json'}: not a tokenizer ({error}); copy or export the model again"
            ) from error

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of the tokens with a role."""
        return list(dict.fromkeys([*self.special_tokens.values(), *self._extra]))

    @property
    def bos_token(self) -> str | None:
        """The token that begins a sequence, if the model has one."""
        return self.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Its id."""
        return None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills rows."""
        text = self.special_tokens.get("pad_token")
        return None if text is None else self._tokenizer.token_to_id(text)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[Any]]:
        """Ids and offsets; a string gives one row, a list one row per text, as transformers does."""
        if isinstance(text, str):
            rows = [self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
            return {"input_ids": rows[0].ids, "offset_mapping": rows[0].offsets}
        rows = self._tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [row.ids for row in rows], "offset_mapping": [row.offsets for row in rows]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of some ids."""
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        **switches: Any,
    ) -> str:
        """The conversation as text, rendered in a sandbox as transformers does."""
        from jinja2.exceptions import TemplateError

        switches.pop("tokenize", None)
        environment = _environment()
        values = {
            **self.special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            **switches,
        }
        try:
            return str(environment.from_string(chat_template or self.chat_template or "").render(**values))
        except TemplateError as error:
            raise InputError(
                f"the tokenizer's chat template cannot be used ({error}); set use_chat_template to false"
            ) from error


def _environment() -> Any:
    """Jinja with the switches and helpers that chat templates are written for."""
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return values


def _token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json: a text, or an object that holds one."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None
