"""NIAH: retrieval heads, found by copy events while the model writes the answer to a needle question.

Shapes: L layers, H heads, T decoding steps. At each step a head scores when the token it attends to most lies in the
needle's answer and is the token generated; the score of a trial is events / answer tokens, and trials count only when
the answer is right. Decoding is greedy with a cache; of every step only each head's most attended position is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from headrank.errors import InputError
from headrank.generation.generation import LocalGenerator, Message
from headrank.method.prompt import neutralise
from headrank.selection.needles import Needle
from headrank.selection.selection import RunningMean

_log = logging.getLogger(__name__)
IMPLEMENTATION = "headrank_niah"
MAX_NEW_TOKENS = 40
RECALL = 0.5  # the share of the answer's words that must come back, as in the original detection


@dataclass
class StepCapture:
    """The most attended position of every head at one decoding step; ``length`` is the number of tokens so far."""

    length: int
    positions: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [H]


def niah_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    headrank_step: StepCapture | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA; on a step of one token it also notes where each head looks most (softmax does not change which one)."""
    if headrank_step is not None and query.shape[2] == 1:
        # logits again, because SDPA gives no weights; one row per step is cheap
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits_HS = (query[0].float() @ keys[0].float().transpose(-1, -2))[:, 0]
        if attention_mask is not None:
            mask_S = attention_mask[0, 0, 0, : logits_HS.shape[-1]]
            logits_HS = (
                logits_HS.masked_fill(~mask_S, float("-inf")) if mask_S.dtype == torch.bool else logits_HS + mask_S
            )
        dropped = headrank_step.length - key.shape[2]  # what a sliding-window cache has forgotten
        headrank_step.positions[module.layer_idx] = logits_HS.argmax(-1) + dropped
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def register() -> str:
    """Register the function with transformers (idempotent) and return the implementation's name."""
    AttentionInterface.register(IMPLEMENTATION, niah_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return IMPLEMENTATION


@torch.inference_mode()
def decode(
    model: Any, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Iterable[int]
) -> tuple[list[int], np.ndarray]:
    """Greedy decoding: the tokens written (without the stop token) and every head's most attended position [T, L, H].

    The row of a step is that of the token fed in, which is the one that predicts the token written.
    """
    stop, device = set(stop_ids), model.device
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    # without the last token: the step that feeds it is the one that predicts the first word, and it is to be seen
    prefill = torch.tensor([list(prompt_ids[:-1])], device=device)
    cache = model(input_ids=prefill, use_cache=True, logits_to_keep=1).past_key_values
    written: list[int] = []
    positions = []
    token = int(prompt_ids[-1])
    for step in range(max_new_tokens):
        capture = StepCapture(len(prompt_ids) + step)
        output = model(
            input_ids=torch.tensor([[token]], device=device),
            past_key_values=cache,
            use_cache=True,
            headrank_step=capture,
        )
        if len(capture.positions) != num_layers:
            raise InputError(
                f"{model.config._name_or_path}: this architecture does not call the registered attention in every layer"
            )
        token = int(output.logits[0, -1].argmax())
        if token in stop:
            break
        written.append(token)
        positions.append(torch.stack([capture.positions[layer] for layer in range(num_layers)]).cpu().numpy())
    num_heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
    return written, np.array(positions, np.int64).reshape(len(written), num_layers, num_heads)


def copy_score(
    prompt_ids: Sequence[int], answer_span: tuple[int, int], written: Sequence[int], positions_TLH: np.ndarray
) -> np.ndarray:
    """The score [L, H] of one trial: copy events / answer tokens."""
    start, end = answer_span
    prompt = np.asarray(prompt_ids)
    score_LH = np.zeros(positions_TLH.shape[1:])
    for token, positions_LH in zip(written, positions_TLH, strict=True):
        inside = (positions_LH >= start) & (positions_LH < end)
        # where() keeps positions of written tokens, which lie beyond the prompt, out of the index
        looked_at = prompt[np.where(inside, positions_LH, 0)]
        score_LH += inside & (looked_at == token)
    return score_LH / (end - start)


def is_right(answer: str, response: str) -> bool:
    """Whether more than half of the answer's words come back (unigram recall, every word as often as it is in the
    answer).
    """

    def words(text: str) -> list[str]:
        return "".join(char.lower() if char.isalnum() else " " for char in text).split()

    left, wanted = words(response), words(answer)
    found = 0
    for word in wanted:
        if word in left:
            # each word of the response answers for one word of the answer: "the the the" is not three hits
            left.remove(word)
            found += 1
    return found > RECALL * len(wanted)


class NiahSelection:
    """Mean copy score over the needles that were answered; top 8 heads here, as for the other methods."""

    name, top_k = "niah", 8

    def __init__(self, generator: LocalGenerator, *, max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        """``generator`` holds the model, with the attention of ``register``; see ``load``."""
        self.generator, self.max_new_tokens = generator, max_new_tokens
        self.scores, self.asked = RunningMean(), 0

    @classmethod
    def load(cls, model: str | Path, **options: Any) -> NiahSelection:
        """Load a chat model with the attention that notes copy events; options: device, dtype, max_new_tokens."""
        limit = options.pop("max_new_tokens", MAX_NEW_TOKENS)
        generator = LocalGenerator.load(model, **options)
        generator.model.set_attn_implementation(register())
        return cls(generator, max_new_tokens=limit)

    def ask(self, needle: Needle) -> str:
        """Let the model answer one needle question and count the trial if it is right; returns what it wrote."""
        question = f"{needle.text}\n\nAnswer from the text above in a few words. {needle.question}"
        prompt_ids, span = self._encode(neutralise(question, self.generator.special_tokens), needle)
        tokenizer, model, limit = self.generator.tokenizer, self.generator.model, self.generator.max_length
        if limit is not None and len(prompt_ids) + self.max_new_tokens > limit:
            raise InputError(
                f"niah: a haystack and its question take {len(prompt_ids)} tokens, and the model's context is "
                f"{limit} with the answer; "
                "give shorter haystacks (`haystack_words`)"
            )
        own = model.generation_config.eos_token_id
        stop = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        written, positions = decode(model, prompt_ids, max_new_tokens=self.max_new_tokens, stop_ids=stop)
        response = tokenizer.decode(written, skip_special_tokens=True)
        self.asked += 1
        right = is_right(needle.answer, response)
        # heads that copied a wrong answer are not retrieval heads: only answered needles count, as in the original
        if right:
            self.scores.add(copy_score(prompt_ids, span, written, positions))
        _log.debug("niah: %s: %r for %r", "right" if right else "wrong", response, needle.answer)
        return response

    def _encode(self, question: str, needle: Needle) -> tuple[list[int], tuple[int, int]]:
        """The prompt's tokens and the range of those that overlap the answer within the needle."""
        text = self.generator.render([Message("user", question)])
        # the last occurrence: a name may stand earlier in the sentence too
        begin = text.index(needle.sentence) + needle.sentence.rindex(needle.answer)
        encoded = self.generator.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [
            n
            for n, (first, last) in enumerate(encoded["offset_mapping"])
            if first < begin + len(needle.answer) and last > begin
        ]
        return encoded["input_ids"], (inside[0], inside[-1] + 1)

    def settings(self) -> dict[str, Any]:
        """How many questions were asked and answered."""
        return {
            "needles": self.asked,
            "answered": self.scores.count,
            "recall_above": RECALL,
            "max_new_tokens": self.max_new_tokens,
        }

    def columns(self) -> dict[str, np.ndarray]:
        """The mean copy score."""
        if not self.scores.count:
            raise InputError(
                f"niah: none of {self.asked} needle questions was answered, so no copying was seen; give shorter "
                "haystacks "
                "(`haystack_words`), more needles (`needles`) or a stronger model"
            )
        return {"copy_score": self.scores.value("an answered needle")}
