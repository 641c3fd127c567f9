"""The prompt: documents before the query, so that a causal model's query tokens can look back at every document.

One frozen template with named switches; its hash travels in heads.json, in the reference cache and in headrank.json, so
that heads chosen under one prompt are never used under another without anybody noticing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from headrank.errors import InputError

QUERY_ROWS = ("query", "query-suffix", "instruction", "instruction-query", "instruction-query-next")
ORDERS = ("retriever", "reversed")
LAYOUTS = ("sequential", "parallel", "late")
_SENTINEL = "\u2063headrank-content\u2063"
# the date that Llama 3's own template has without a clock
_FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


@dataclass(frozen=True)
class PromptTemplate:
    """The layout of ICR and CoRe with its switches.

    ``query_rows`` says which rows are I_q of Eq. 1: the query's own tokens, those and the chat suffix (its tokens have
    seen the whole query), everything from the late instruction to the end (as ICR and QR do), from the late instruction
    to the query's end, or to the first token after it (as CoRe's code does). ``order`` is that of the documents.
    ``document_label`` stands before each document, {} in it is its number; ``label_in_span`` counts the label's
    attention as the document's, as ICR does. Those of published methods are in published_prompts.py.
    ``document_layout``: documents one after another, each reading those before it (the paper's), or in the parallel
    layout, each reading the opening and itself, at the same positions and without a number, so that their order does
    not matter; late is parallel with a query branch that reads no passage and begins at ``branch_position`` (P),
    whatever the passages' lengths.
    """

    opening: str = " Here are some paragraphs:\n\n"
    instruction: str = (
        "Please find information that are relevant to the following query in the paragraphs above.\n\nQuery: "
    )
    calibration_query: str = "N/A"
    max_words: int = 300
    query_rows: Literal["query", "query-suffix", "instruction", "instruction-query", "instruction-query-next"] = "query"
    order: Literal["retriever", "reversed"] = "retriever"
    use_chat_template: bool = True
    document_layout: Literal["sequential", "parallel", "late"] = "sequential"
    branch_position: int = 512
    document_label: str = "[{}] "
    label_in_span: bool = False

    def __post_init__(self) -> None:
        if self.query_rows not in QUERY_ROWS:
            raise InputError(f"prompt: query_rows {self.query_rows!r} is not one of {', '.join(QUERY_ROWS)}")
        if self.order not in ORDERS:
            raise InputError(f"prompt: order {self.order!r} is not one of {', '.join(ORDERS)}")
        if self.document_layout not in LAYOUTS:
            raise InputError(f"prompt: document_layout {self.document_layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.branch_position < 1:
            raise InputError(f"prompt: branch_position {self.branch_position} must be at least 1")
        if self.is_late and (self.query_rows, self.order) != ("query", "retriever"):
            raise InputError(
                "prompt: the late layout reads the query's own rows and has no order; leave out query_rows and order"
            )
        if self.max_words < 1:
            raise InputError(f"prompt: max_words {self.max_words} must be at least 1")
        if self.document_layout != "sequential" and self.has_own_label:
            raise InputError(
                "prompt: documents have no label outside the sequential layout; leave out document_label and "
                "label_in_span"
            )

    def to_dict(self) -> dict[str, Any]:
        """The switches as plain values; the branch position belongs to the late layout alone, and a label is named
        where it is another.
        """
        hidden = set() if self.is_late else {"branch_position"}
        hidden |= set() if self.has_own_label else {"document_label", "label_in_span"}
        return {name: value for name, value in asdict(self).items() if name not in hidden}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PromptTemplate:
        """The inverse of ``to_dict``; an unknown switch is an InputError."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"prompt: unknown switch {unknown[0]!r}; was this file written by a newer headrank?")
        for field in fields(cls):
            value = values.get(field.name, field.default)
            if type(value) is not type(field.default):
                raise InputError(f"prompt: {field.name} must be a {type(field.default).__name__}, found {value!r}")
        return cls(**values)

    @property
    def has_own_label(self) -> bool:
        """Whether documents are labelled in another way than "[1] ", or their labels are read."""
        return (self.document_label, self.label_in_span) != ("[{}] ", False)

    def label(self, number: int) -> str:
        """What stands before the document of this number; nothing in the parallel layout, where documents have no
        order.
        """
        return "" if self.is_parallel else self.document_label.replace("{}", str(number))

    @property
    def is_parallel(self) -> bool:
        """Whether this is the parallel layout, in which documents do not see each other."""
        return self.document_layout == "parallel"

    @property
    def is_late(self) -> bool:
        """Whether the query branch reads no passage; passages and queries are then two forwards."""
        return self.document_layout == "late"

    @property
    def identity(self) -> dict[str, Any]:
        """What hashes and cache keys are made of: the switches, without those that did not exist when older files
        were written.
        """
        hidden = {"document_layout"} if self.document_layout == "sequential" else set()
        return {name: value for name, value in self.to_dict().items() if name not in hidden}

    @property
    def hash(self) -> str:
        """Twelve hex digits that change when any switch changes."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def short(cls, tokenizer: Any, **switches: Any) -> PromptTemplate:
        """The short prompt: the start of the chat's user turn as the opening, "Query: " before the query, nothing else.

        A few tokens instead of some 36, at nearly the same quality in the late layout. The opening is never empty: log
        masses are read relative to it.
        """
        before = ChatFrame.of(tokenizer, cls()).before
        role = before.rfind("user")
        starts = [before.rfind(token, 0, role + 1) for token in control_tokens(tokenizer)] if role >= 0 else []
        opening = before[max(starts) :] if starts and max(starts) >= 0 else before
        opening = opening.removeprefix(_beginning_of_sequence(tokenizer))  # without a chat template the frame writes it
        return cls(opening=opening or "\n", instruction="Query: ", use_chat_template=False, **switches)

    def document_text(self, title: str, text: str) -> str:
        """A document as it stands in the prompt: title on its own line, at most ``max_words`` words of text."""
        body = " ".join(text.split()[: self.max_words])
        title = " ".join(title.split())
        return f"{title}\n{body}" if title else body


@dataclass(frozen=True)
class ChatFrame:
    """What the chat template puts before and after the user's words."""

    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any, template: PromptTemplate) -> ChatFrame:
        """Render the tokenizer's chat template around a sentinel; no template means no frame.

        Thinking is switched off for templates that know the switch (Qwen3); the others ignore it. Templates that write
        today's date (Llama 3.2) get a fixed one: the prompt of a model must not change overnight.
        """
        if not template.use_chat_template or not getattr(tokenizer, "chat_template", None):
            return cls(_beginning_of_sequence(tokenizer), "")
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}],
            chat_template=_with_a_fixed_date(tokenizer.chat_template),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        before, sentinel, after = rendered.partition(_SENTINEL)
        if not sentinel:
            raise InputError(
                "the tokenizer's chat template drops or changes the user's text; set use_chat_template to false"
            )
        return cls(before, after)


def _with_a_fixed_date(template: Any) -> str | None:
    """A template that asks for the time, with an answer that stays; None for all others, which are taken as they
    are.
    """
    return _FIXED_DATE + template if isinstance(template, str) and "strftime_now" in template else None


def _beginning_of_sequence(tokenizer: Any) -> str:
    """The BOS token's text where the tokenizer itself would add one, else nothing."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    return (
        tokenizer.bos_token if ids and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id else ""
    )


def control_tokens(tokenizer: Any) -> list[str]:
    """The tokens that are more than their letters: those with a role, and those only marked as special (<|eot_id|>
    of Llama 3).
    """
    marked = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *marked]))


def neutralise(text: str, special_tokens: Sequence[str]) -> str:
    """Break the tokenizer's control tokens inside outside text, so that a passage cannot end the user's turn."""
    for token in special_tokens:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text
