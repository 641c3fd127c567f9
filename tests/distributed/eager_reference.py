"""The slow, obvious truth: Hugging Face eager attention, two separate passes, Python loops. Shares no code with what
it checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headrank.method.spans import EncodedContext
from tests.slow_reference import slow_parallel_prompt


def toy_contexts(vocab: int, *, is_parallel: bool = False) -> list[EncodedContext]:
    """Two prompts of different length and number of documents, one of them with a one-token document."""
    generator = np.random.default_rng(5)

    def context(prefix: int, query: int, spans: tuple[tuple[int, int], ...]) -> EncodedContext:
        calibration = 5
        ids = generator.integers(3, vocab, prefix + query).astype(np.int32)
        ids = np.concatenate([ids, np.arange(7, 7 + calibration, dtype=np.int32)])
        start, second = prefix, prefix + query
        rows = (start + 2, start + query - 1), (second + 2, second + 4)
        return EncodedContext(ids, prefix, query, calibration, *rows, spans, is_parallel=is_parallel)

    return [context(61, 9, ((3, 20), (22, 40), (44, 60))), context(47, 6, ((3, 25), (30, 31)))]


def toy_loss(scores_BN: torch.Tensor, num_documents: tuple[int, ...]) -> torch.Tensor:
    """A loss that depends on every score, not linearly."""
    total = scores_BN.new_zeros(())
    for row, count in zip(scores_BN, num_documents, strict=True):
        scores = 10 * row[:count]
        total = (
            total
            - torch.nn.functional.logsigmoid(scores[0] - scores[1])
            + scores.softmax(0).square().sum()
            + scores.square().mean()
        )
    return total


class EagerReference:
    """One model, one batch: logits, per-head statistics, scores of the core heads, the loss and all gradients."""

    def __init__(
        self,
        directory: Path,
        contexts: list[EncodedContext],
        heads_by_layer: dict[int, list[int]],
        adapter: Path | None = None,
    ) -> None:
        """``adapter`` is a PEFT folder, which peft itself puts on the model."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        per_context = [self._statistics(model, context) for context in contexts]
        self.logits = [values["logits"].detach() for values in per_context]
        self.masses, self.calibrated, self.entropies = (
            [values[name].detach() for values in per_context] for name in ("masses", "calibrated", "entropies")
        )
        num_documents = tuple(len(context.document_spans) for context in contexts)
        rows = []
        for context, values in zip(contexts, per_context, strict=True):
            pairs = [(layer, head) for layer, heads in heads_by_layer.items() for head in heads]
            query = torch.stack([values["query"][layer][head] for layer, head in pairs]).sum(0)
            neutral = torch.stack([values["neutral"][layer][head] for layer, head in pairs]).sum(0)
            scores = torch.stack([_kept_sum(query[a:b] - neutral[a:b]) for a, b in context.document_spans])
            rows.append(torch.cat([scores, scores.new_zeros(max(num_documents) - len(scores))]))
        self.scores = torch.stack(rows)
        self.loss = toy_loss(self.scores, num_documents)
        self.loss.backward()
        self.gradients = {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        self.scores, self.loss = self.scores.detach(), self.loss.detach()

    def _statistics(self, model: Any, context: EncodedContext) -> dict[str, Any]:
        """Averaged rows [L][H] of both passes over the prefix, and what follows from them."""
        ids = torch.from_numpy(context.input_ids.astype(np.int64))
        prefix, query = context.prefix_length, context.query_length
        passes = [ids[: prefix + query], torch.cat([ids[:prefix], ids[prefix + query :]])]
        how = [
            slow_parallel_prompt(context, len(tokens), model.config) if context.is_parallel else {} for tokens in passes
        ]
        first, second = (
            model(tokens[None], output_attentions=True, **extra) for tokens, extra in zip(passes, how, strict=True)
        )
        rows, neutral_rows = slice(*context.query_rows), slice(*(row - query for row in context.calibration_rows))
        averaged = [attention[0][:, rows].mean(1) for attention in first.attentions]
        neutral = [attention[0][:, neutral_rows].mean(1) for attention in second.attentions]
        spans = context.document_spans
        entropies = [[-sum(float(p) * np.log(float(p)) for p in head if p > 0) for head in layer] for layer in averaged]
        return {
            "logits": first.logits[0],
            "query": averaged,
            "neutral": neutral,
            "masses": torch.stack([torch.stack([layer[:, a:b].sum(1) for a, b in spans], 1) for layer in averaged]),
            "calibrated": torch.stack(
                [
                    torch.stack(
                        [
                            torch.stack([_kept_sum(q[a:b] - n[a:b]) for a, b in spans])
                            for q, n in zip(query, empty, strict=True)
                        ]
                    )
                    for query, empty in zip(averaged, neutral, strict=True)
                ]
            ),
            "entropies": torch.tensor(entropies),
        }


def _kept_sum(differences: torch.Tensor) -> torch.Tensor:
    """The sum of a document's calibrated tokens without those below mean - 2 std."""
    if len(differences) == 1:
        return differences.sum()
    floor = differences.detach().mean() - 2 * differences.detach().std()
    return torch.stack([value for value in differences if value > floor]).sum()
