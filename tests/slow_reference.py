"""The slow, obvious reference: eager attention with output_attentions, one full pass per branch, Python loops."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headrank.method.spans import EncodedContext


@dataclass
class SlowResult:
    """Nested lists indexed [layer][head][token or document]."""

    query_rows: list[list[list[float]]]
    calibration_rows: list[list[list[float]]]


def eager_rows(directory: str, context: EncodedContext) -> SlowResult:
    """Run [prefix | query] and [prefix | calibration] apart at full depth and average the rows of I_q by hand.

    Rows are laid out on the joint sequence: tokens of the other branch get zero. Documents side by side get a whole S x
    S mask.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    prefix, query = context.prefix_length, context.query_length
    first_pass = context.input_ids[: prefix + query]
    second_pass = list(context.input_ids[:prefix]) + list(context.input_ids[prefix + query :])

    def rows(ids: list[int], start: int, end: int) -> list[list[list[float]]]:
        result = []
        for layer in eager_attention(model, context, ids):
            heads = []
            for head in layer:
                total = [0.0] * len(ids)
                for row in range(start, end):
                    for token, weight in enumerate(head[row].tolist()):
                        total[token] += weight / (end - start)
                heads.append(total)
            result.append(heads)
        return result

    query_part = rows(first_pass, *context.query_rows)
    shift = query  # the second pass has no query branch
    calibration = rows(second_pass, context.calibration_rows[0] - shift, context.calibration_rows[1] - shift)
    padded_query = [[head + [0.0] * context.calibration_length for head in layer] for layer in query_part]
    padded_calibration = [[head[:prefix] + [0.0] * query + head[prefix:] for head in layer] for layer in calibration]
    return SlowResult(padded_query, padded_calibration)


def eager_attention(model: Any, context: EncodedContext, ids: list[int]) -> list[torch.Tensor]:
    """Attention probabilities [H, S, S] of every layer for one branch of a context."""
    how = slow_parallel_prompt(context, len(ids), model.config) if context.is_parallel else {}
    with torch.no_grad():
        attentions = model(
            torch.tensor([list(map(int, ids))]), output_attentions=True, use_cache=False, **how
        ).attentions
    return [layer[0] for layer in attentions]


def slow_parallel_prompt(context: EncodedContext, length: int, config: Any) -> dict[str, Any]:
    """Position ids and additive mask of one pass, token by token: a document sees what precedes the first one, and
    itself.

    A model with some layers of sliding windows takes a mask for each kind of layer.
    """
    starts = [start for start, _ in context.document_spans]
    opening, longest = (
        starts[0],
        max(end - start for start, end in zip(starts, [*starts[1:], context.prefix_length], strict=True)),
    )

    def block(token: int) -> int | None:
        if token < opening or token >= context.prefix_length:
            return None
        return max(
            number
            for number, start in enumerate(starts)
            if start <= token and (number == 0 or start != starts[number - 1])
        )

    positions, mask = [], torch.full((length, length), torch.finfo(torch.float32).min)
    for row in range(length):
        mine = block(row)
        if row < opening:
            positions.append(row)
        elif mine is not None:
            positions.append(opening + row - starts[mine])
        else:
            positions.append(opening + longest + row - context.prefix_length)
        for key in range(row + 1):
            if mine is None or block(key) in (None, mine):
                mask[row, key] = 0.0
    near = mask.clone()
    for row in range(length):
        for key in range(row):
            if positions[row] - positions[key] >= (getattr(config, "sliding_window", None) or length):
                near[row, key] = torch.finfo(torch.float32).min
    kinds = {"full_attention": mask[None, None], "sliding_attention": near[None, None]}
    layers = getattr(config, "layer_types", None)
    chosen = (
        kinds
        if layers and "sliding_attention" in layers
        else kinds["full_attention" if layers else "sliding_attention"]
    )
    return {"position_ids": torch.tensor([positions]), "attention_mask": chosen}


def slow_masses(rows: list[float], spans: list[tuple[int, int]]) -> list[float]:
    """Eq. 1 given the averaged row: sum over the document's tokens."""
    return [sum(rows[token] for token in range(start, end)) for start, end in spans]


def slow_calibrated(
    query_rows: list[float], calibration_rows: list[float], spans: list[tuple[int, int]]
) -> list[float]:
    """Difference per token, drop tokens at or below mean - 2 std (unbiased), sum the rest."""
    scores = []
    for start, end in spans:
        values = [query_rows[token] - calibration_rows[token] for token in range(start, end)]
        if len(values) > 1:
            floor = statistics.mean(values) - 2 * statistics.stdev(values)
            values = [value for value in values if value > floor]
        scores.append(math.fsum(values))
    return scores


def slow_entropy(rows: list[float]) -> float:
    """Shannon entropy in nats."""
    return -math.fsum(value * math.log(value) for value in rows if value > 0)
