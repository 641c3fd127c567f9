"""The slow, obvious reference: eager attention with output_attentions, one full pass per branch, Python loops."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from headrank.spans import EncodedContext


@dataclass
class SlowResult:
    """Nested lists indexed [layer][head][token or document]."""

    query_rows: list[list[list[float]]]
    calibration_rows: list[list[list[float]]]


def eager_rows(directory: str, context: EncodedContext) -> SlowResult:
    """Run [prefix | query] and [prefix | calibration] apart at full depth and average the rows of I_q by hand.

    Rows are laid out on the joint sequence: tokens of the other branch get zero.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    prefix, query = context.prefix_length, context.query_length
    first_pass = context.input_ids[: prefix + query]
    second_pass = list(context.input_ids[:prefix]) + list(context.input_ids[prefix + query :])

    def rows(ids: list[int], start: int, end: int) -> list[list[list[float]]]:
        with torch.no_grad():
            attentions = model(torch.tensor([list(map(int, ids))]), output_attentions=True, use_cache=False).attentions
        result = []
        for layer in attentions:
            heads = []
            for head in layer[0]:
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


def slow_masses(rows: list[float], spans: list[tuple[int, int]]) -> list[float]:
    """Eq. 1 given the averaged row: sum over the document's tokens."""
    return [sum(rows[token] for token in range(start, end)) for start, end in spans]


def slow_calibrated(query_rows: list[float], calibration_rows: list[float], spans: list[tuple[int, int]]) -> list[float]:
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
