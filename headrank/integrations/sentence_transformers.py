"""sentence-transformers: a reranker with the methods of a CrossEncoder, for code that expects one.

HeadRank reads lists, not pairs: the pairs of one query in one call of ``predict`` are one list, wherever they stand in
it. So the score of a pair depends on the others of its query, and comparing scores across calls means nothing; ranking
within a query does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.integrations import needs
from headrank.integrations.shared_reranker import RerankerSettings, SharedReranker
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

with needs("sentence-transformers"):
    from sentence_transformers.cross_encoder.model_card import CrossEncoderModelCardData

Pair = Sequence[Any]  # (query, document)


class HeadRankCrossEncoder:
    """``predict`` and ``rank`` as CrossEncoder has them; evaluators and rerank pipelines of sentence-transformers
    run on it.
    """

    num_labels = 1

    def __init__(
        self,
        model_name_or_path: str = "embedded",
        *,
        heads: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        reranker: HeadRankReranker | None = None,
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``; ``batch_size`` counts lists. Or a ``reranker`` that
        is loaded.
        """
        self.shared = SharedReranker(
            RerankerSettings(model_name_or_path, heads, device, dtype, batch_size, max_length), reranker
        )
        self.shared.load()
        self.model_card_data = CrossEncoderModelCardData()

    @property
    def device(self) -> Any:
        """Where the model lives."""
        return self.shared.load().reader.device

    def predict(
        self,
        inputs: Sequence[Pair] | Pair,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Any = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **ignored: Any,
    ) -> Any:
        """The scores of (query, document) pairs in the order given, as a CrossEncoder with one label returns them.

        A document that comes twice for a query is read once. ``batch_size`` counts pairs there and lists here, so it is
        not taken over; prompts and activations of a classifier have no meaning here, and an ``activation_fn`` other
        than None is refused.
        """
        del batch_size, show_progress_bar, apply_softmax, ignored
        _refuse_classifier_switches(prompt_name, prompt, activation_fn)
        is_single = _is_pair(inputs)
        scores = np.asarray(self._pair_scores([inputs] if is_single else list(inputs)), np.float32)
        if convert_to_tensor or not convert_to_numpy:
            import torch

            tensor = torch.from_numpy(scores)
            return tensor[0] if is_single else tensor if convert_to_tensor else list(tensor)
        return scores[0] if is_single else scores

    def _pair_scores(self, pairs: Sequence[Pair]) -> list[float]:
        """One list per query, each of its documents once."""
        places: dict[str, dict[Any, int]] = {}
        documents: dict[str, list[DocumentLike]] = {}
        for number, pair in enumerate(pairs):
            if not _is_pair(pair):
                raise InputError(
                    f"pair {number} must be (query, document), found {type(pair).__name__}: {str(pair)[:60]!r}"
                )
            query, document = pair
            seen = places.setdefault(query, {})
            if _identity(document) not in seen:
                seen[_identity(document)] = len(seen)
                documents.setdefault(query, []).append(document)
        scores = dict(zip(documents, self.shared.score_lists(list(documents.items())), strict=True))
        return [scores[query][places[query][_identity(document)]] for query, document in pairs]

    def rank(
        self,
        query: str,
        documents: Sequence[DocumentLike],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        activation_fn: Any = None,
        **ignored: Any,
    ) -> list[dict[str, Any]]:
        """[{"corpus_id", "score"(, "text")}], best first, as CrossEncoder.rank does."""
        del ignored
        _refuse_classifier_switches(prompt_name, prompt, activation_fn)
        rows: list[dict[str, Any]] = [
            {"corpus_id": place, "score": score} for place, score in self.shared.rank(query, documents, top_k)
        ]
        return [row | {"text": documents[row["corpus_id"]]} for row in rows] if return_documents else rows


def _refuse_classifier_switches(prompt_name: str | None, prompt: str | None, activation_fn: Any) -> None:
    """What would change the scores of a CrossEncoder and could not be obeyed here."""
    for name, value in (("prompt_name", prompt_name), ("prompt", prompt), ("activation_fn", activation_fn)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} is for classifiers; HeadRank's prompt comes with its heads and its scores are as "
                "they are"
            )


def _is_pair(value: Any) -> bool:
    """Whether this is one (query, document), not a list of them."""
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and isinstance(value[0], str)


def _identity(document: DocumentLike) -> Any:
    return document if isinstance(document, str) else tuple(sorted(document.items()))
