"""From texts to the tokens of the late layout: opening, passages and query branches, each on its own.

A passage's tokens depend on its text and the template only, a query branch's on the query and the template only. The
chat suffix stands after the rows that are read, so it is not even tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.files import quote
from headrank.method.prompt import ChatFrame, PromptTemplate, control_tokens, neutralise
from headrank.method.tokens import cleaned_query, require_offsets, tokenise

MIN_BRANCH_TOKENS = 32  # room for a query of a usual length behind P, or the model is refused at once


@dataclass(frozen=True)
class EncodedPassage:
    """A passage's tokens; ``is_shortened`` when its end did not fit before the branch position."""

    input_ids: np.ndarray  # int32 [T]
    is_shortened: bool = False
    text: str = ""  # as in the prompt, only with keep_text
    offsets: np.ndarray | None = None  # [T, 2] characters within text, only with keep_text


@dataclass(frozen=True)
class EncodedQuery:
    """The query branch up to the query's last token; rows of I_q are [first_row, length)."""

    input_ids: np.ndarray  # int32
    first_row: int
    text: str = ""
    offsets: np.ndarray | None = None  # [rows, 2] characters within text

    @property
    def num_rows(self) -> int:
        """Tokens of the query itself."""
        return len(self.input_ids) - self.first_row


class LateEncoder:
    """Turns passages and queries into tokens for one tokenizer and one late template."""

    def __init__(self, tokenizer: Any, template: PromptTemplate, max_length: int | None = None) -> None:
        """``max_length`` is the number of positions that the branch may reach, see ``late_limit``."""
        require_offsets(tokenizer)
        self.tokenizer, self.template, self.max_length = tokenizer, template, max_length
        self._special = control_tokens(tokenizer)
        self.opening_ids = tokenise(tokenizer, [ChatFrame.of(tokenizer, template).before + template.opening])[0][0]
        self.room = template.branch_position - len(self.opening_ids)
        if not len(self.opening_ids) or self.room < 1:
            raise InputError(
                f"prompt: the opening takes {len(self.opening_ids)} of the {template.branch_position} positions "
                "before the branch; "
                "it must take at least one and leave room for passages: change opening or branch_position"
            )

    def encode_passages(self, documents: Sequence[tuple[str, str]], *, keep_text: bool = False) -> list[EncodedPassage]:
        """Tokens of (title, text) passages, cut where they would reach the branch position."""
        texts = [neutralise(self.template.document_text(*document), self._special) for document in documents]
        return [
            EncodedPassage(
                # the end is cut and not the query's place moved: a query branch at another position would give the same
                # passage another score
                ids[: self.room],
                is_shortened=len(ids) > self.room,
                text=text if keep_text else "",
                offsets=offsets[: self.room] if keep_text else None,
            )
            for text, (ids, offsets) in zip(texts, tokenise(self.tokenizer, texts), strict=True)
        ]

    def encode_query(self, query: str) -> EncodedQuery:
        """Instruction and query; a query that does not fit behind the branch position is an InputError."""
        cleaned = cleaned_query(query, self._special)
        instruction = self.template.instruction
        ids, offsets = tokenise(self.tokenizer, [instruction + cleaned])[0]
        # a token that begins in the instruction and ends in the query counts as the query's
        first = int(np.searchsorted(offsets[:, 1], len(instruction), side="right"))
        reached = self.template.branch_position + len(ids)
        if self.max_length is not None and reached > self.max_length:
            raise InputError(
                f"query {quote(query)}: its {len(ids)} tokens at position {self.template.branch_position} do not "
                "fit the model's "
                f"{self.max_length} positions; shorten the query"
            )
        return EncodedQuery(ids, first, text=cleaned, offsets=np.clip(offsets[first:] - len(instruction), 0, None))


def late_limit(config: Any, template: PromptTemplate, name: str) -> int | None:
    """Positions that the late layout may use in a model of this configuration; a model that has too few is refused.

    Within the smallest sliding window every row still sees the opening, so a score has one meaning at all layers.
    ``dynamic`` and ``longrope`` rotary embeddings change all angles once a *sequence* outgrows the original context:
    the query's forward would then not match keys that were made in other forwards.
    """
    limits: dict[str, int] = {}
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        limits["context"] = int(positions)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    is_used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if window and is_used:
        limits["sliding window"] = int(window)
    for rope in _rope_settings(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope"):
            original = (
                rope.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or positions
            )
            if original is not None:
                limits[f"original context of its {kind} rotary embedding"] = int(original)
    if not limits:
        return None
    what, limit = min(limits.items(), key=lambda item: item[1])
    if template.branch_position + MIN_BRANCH_TOKENS > limit:
        raise InputError(
            f"{name}: the late layout puts the query at position {template.branch_position}, which with "
            f"{MIN_BRANCH_TOKENS} tokens of "
            f"query does not fit the model's {what} of {limit}; choose a smaller branch position or another "
            "document layout"
        )
    return limit


def _rope_settings(settings: Any) -> list[Mapping[str, Any]]:
    """The rope settings of a configuration: one mapping, or one per kind of layer."""
    if not isinstance(settings, Mapping):
        return []
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    return nested or [settings]
