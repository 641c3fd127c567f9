"""What both token caches keep of every training list besides its tokens: ids, grades, a teacher's scores, pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.array_folder import Arrays, ArrayWriter
from data_tools.contexts import Context

LIST_DTYPES: dict[str, type] = {
    "grades": np.int32,  # [documents of all contexts], list order, -1 unjudged
    "teacher": np.float32,  # like grades: a teacher's raw scores, NaN where there is none
    "documents": np.int64,  # [C + 1] first document of each context
    "pairs": np.int32,  # [M, 2] (chosen, rejected) list indices
    "pair_starts": np.int64,  # [C + 1] first pair of each context
    "names": np.uint8,  # UTF-8 of context and query ids
    "name_ends": np.int64,  # [C, 2] end of context id and of query id in names
}
LIST_WIDTHS = {"pairs": 2, "name_ends": 2}


class ListArrays:
    """The arrays of an opened cache, one attribute each; nothing is read until asked for."""

    grades: np.ndarray
    teacher: np.ndarray
    documents: np.ndarray
    pairs: np.ndarray
    pair_starts: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray

    def __init__(self, folder: Path, arrays: Arrays) -> None:
        """Map the files of ``folder``."""
        self.folder = folder
        for name, array in arrays.open(folder).items():
            setattr(self, name, array)
        self.num_contexts = len(self.documents) - 1

    def names_of(self, context: int) -> tuple[str, str]:
        """Context id and query id."""
        start = int(self.name_ends[context - 1, 1]) if context else 0
        middle, end = map(int, self.name_ends[context])
        return bytes(self.names[start:middle]).decode(), bytes(self.names[middle:end]).decode()

    def grades_of(self, context: int) -> np.ndarray:
        """Grades int64 [N] in list order, -1 where unjudged."""
        return np.array(self.grades[self.documents_of(context)], np.int64)

    def teacher_of(self, context: int) -> np.ndarray:
        """A teacher's raw scores float32 [N] in list order, NaN where it gave none."""
        return np.array(self.teacher[self.documents_of(context)])

    def pairs_of(self, context: int) -> np.ndarray:
        """Pairs int64 [M, 2] of (chosen, rejected) list indices."""
        first, stop = map(int, self.pair_starts[context : context + 2])
        return np.array(self.pairs[first:stop], np.int64)

    def documents_of(self, context: int) -> slice:
        """The places of a context's documents in every array that has one entry per document."""
        return slice(*map(int, self.documents[context : context + 2]))


class ListWriter:
    """Writes these arrays, context by context; ``num_documents`` counts what was written."""

    def __init__(self, writer: ArrayWriter) -> None:
        self._writer = writer
        self.num_documents = self._pairs = self._names = 0
        # the first end of "documents" and "pair_starts" is a start: C + 1 entries need no special case for context 0
        writer.append("documents", [0])
        writer.append("pair_starts", [0])

    def add(self, context: Context, chosen: Sequence[Any]) -> None:
        """A context and its pairs as list indices."""
        append = self._writer.append
        append("grades", [-1 if document.grade is None else document.grade for document in context.documents])
        scores = [document.teacher_score for document in context.documents]
        append("teacher", [math.nan if score is None else score for score in scores])
        append("pairs", chosen)
        context_name, query_name = context.context_id.encode(), context.query_id.encode()
        append("names", np.frombuffer(context_name + query_name, np.uint8))
        middle = self._names + len(context_name)
        self._names = middle + len(query_name)
        append("name_ends", [middle, self._names])
        self.num_documents += len(context.documents)
        self._pairs += len(chosen)
        append("documents", [self.num_documents])
        append("pair_starts", [self._pairs])
