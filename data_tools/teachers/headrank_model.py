"""Another HeadRank model as the teacher: a large one labels what a small one learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.teachers.teacher import QueryList, TeacherSpec
from headrank.artifacts import fingerprint, model_fingerprint


class HeadRankTeacher:
    """Scores whole lists: in the sequential layout passages read those before them, so a list is scored as one."""

    def __init__(self, spec: TeacherSpec) -> None:
        """Load the model with its heads."""
        from headrank.reranking.reranker import HeadRankReranker
        from headrank.reranking.shipped_readouts import model_to_read

        model = model_to_read(spec.name, spec.heads)
        self._reranker = HeadRankReranker.from_pretrained(spec.name, spec.heads, device=spec.device)
        self._identity = {
            "kind": "headrank",
            "name": "embedded" if spec.name == "embedded" else Path(model).name,
            "fingerprint": model_fingerprint(model),
            "heads": fingerprint(self._reranker.heads.to_dict()),
            "scores": "sums over the heads",
        }

    def identity(self) -> dict[str, Any]:
        """The model's files and its heads with their prompt."""
        return self._identity

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        """The reranker's scores, list by list."""
        requests = [
            (query, [{"title": document.title, "text": document.text} for document in documents])
            for query, documents in lists
        ]
        return [np.asarray(result.scores, np.float64) for result in self._reranker.score_batch(requests)]
