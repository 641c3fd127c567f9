"""A sentence-transformers CrossEncoder, by folder or by its name on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.teachers.teacher import QueryList, TeacherSpec, passage_text
from headrank.artifacts import model_fingerprint
from headrank.errors import InputError


class CrossEncoderTeacher:
    """Scores the pairs of all lists of a call together, in batches of similar length (the package sorts them)."""

    def __init__(self, spec: TeacherSpec) -> None:
        """Load the model; one with several output classes is no reranker."""
        import torch
        from sentence_transformers import CrossEncoder

        try:
            self._model = CrossEncoder(spec.name, max_length=spec.max_tokens, device=spec.device)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"`teacher` {spec.name!r}: no cross-encoder can be loaded ({reason[:200]}); give a folder or a hub name"
            ) from error
        if self._model.num_labels != 1:
            raise InputError(
                f"`teacher` {spec.name!r}: has {self._model.num_labels} output classes; a reranker has one"
            )
        self._activation = torch.nn.Identity()  # logits: a sigmoid would flatten the margins that a student learns from
        self._batch_size, self._max_words = spec.batch_size or 16, spec.max_words
        is_folder = Path(spec.name).is_dir()
        self._identity = {
            "kind": "cross-encoder",
            "name": Path(spec.name).resolve().name if is_folder else spec.name,
            "fingerprint": model_fingerprint(spec.name) if is_folder else None,
            "commit": None if is_folder else _commit_of(spec.name),
            "max_tokens": spec.max_tokens,
            "max_words": spec.max_words,
            "dtype": str(self._model.model.dtype).removeprefix("torch."),
            "scores": "raw logits",
        }

    def identity(self) -> dict[str, Any]:
        """The folder's files or the hub's commit, the precision and the truncation."""
        return self._identity

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        """Raw logits of all lists in one call."""
        pairs = [
            (query, passage_text(document, self._max_words)) for query, documents in lists for document in documents
        ]
        if not pairs:
            return [np.empty(0) for _ in lists]
        scores = self._model.predict(
            pairs,
            batch_size=self._batch_size,
            activation_fn=self._activation,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        ends = np.cumsum([len(documents) for _, documents in lists])
        return [part.astype(np.float64) for part in np.split(np.asarray(scores), ends[:-1])]


def _commit_of(name: str) -> str | None:
    """The commit of a hub model that was loaded: its files lie in the cache in a folder of that name."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent.name if isinstance(config, str) else None
