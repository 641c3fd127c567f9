"""Where the labels of a collection come from: its qrels, a teacher's TREC run, or both, and what is known about that
run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_tools.labels.grades import GradeSettings, grades_from_scores, merged_grade
from headrank.artifacts import sha256_of
from headrank.errors import InputError
from headrank.formats import Collection, Qrels, read_json, read_run

PROVENANCE_FORMAT = "headrank-labels/1"


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of one candidate. ``grade_from`` is None where there is no teacher: then every grade is the
    qrels'.
    """

    grade: int | None
    grade_from: str | None = None
    teacher_score: float | None = None


class JudgedLabels:
    """Labels of judgements alone."""

    def __init__(self, qrels: Qrels) -> None:
        """Query id -> document id -> grade."""
        self._qrels = qrels

    def __contains__(self, query_id: str) -> bool:
        """Whether any candidate of the query has a label."""
        return query_id in self._qrels

    def of(self, query_id: str, doc_ids: Sequence[str]) -> list[Label]:
        """The labels of these candidates of one query."""
        return [Label(self._qrels[query_id].get(doc_id)) for doc_id in doc_ids]

    def provenance(self) -> dict[str, Any] | None:
        """Nothing to tell: the judgements are part of the collection."""
        return None


class TeacherLabels:
    """Labels of a teacher's run, with judgements as ``settings.qrels`` says."""

    def __init__(self, path: str | os.PathLike[str], settings: GradeSettings, qrels: Qrels | None = None) -> None:
        """Read the run and what stands beside it about its making."""
        self.path, self.settings = Path(path), settings
        self._qrels = {} if qrels is None else qrels
        self._scores = {query_id: {row.doc_id: row.score for row in rows} for query_id, rows in read_run(path).items()}

    def __contains__(self, query_id: str) -> bool:
        """Whether any candidate of the query has a label."""
        return query_id in self._scores or query_id in self._qrels

    def of(self, query_id: str, doc_ids: Sequence[str]) -> list[Label]:
        """The labels of these candidates of one query. Quantiles are over those of them that the teacher scored."""
        known, judged = self._scores.get(query_id, {}), self._qrels.get(query_id, {})
        scores = [known.get(doc_id) for doc_id in doc_ids]
        graded = iter(grades_from_scores([score for score in scores if score is not None], self.settings))
        labels = []
        for doc_id, score in zip(doc_ids, scores, strict=True):
            grade, source = merged_grade(None if score is None else next(graded), judged.get(doc_id), self.settings)
            labels.append(Label(grade, source, score))
        return labels

    def provenance(self) -> dict[str, Any]:
        """The run, how its scores became grades, and the teacher as the run's own provenance names it (None without
        one).
        """
        teacher = None
        beside = provenance_path(self.path)
        if beside.is_file():
            teacher = read_json(beside)
            if not isinstance(teacher, dict) or teacher.get("format") != PROVENANCE_FORMAT:
                raise InputError(
                    f"{beside}: not a {PROVENANCE_FORMAT} file; remove it or label again with 'headrank label'"
                )
        return {
            "run": self.path.name,
            "sha256": sha256_of(self.path),
            "queries": len(self._scores),
            "grades": asdict(self.settings),
            "teacher": teacher,
        }


CollectionLabels = JudgedLabels | TeacherLabels


def provenance_path(run: str | os.PathLike[str]) -> Path:
    """The file beside a teacher's run that says how it was made."""
    return Path(f"{os.fspath(run)}.json")


def labels_of(collection: Collection, run: Path | None, settings: GradeSettings) -> CollectionLabels:
    """The labels of a collection: its qrels, or with ``run`` the teacher's."""
    if run is None:
        return JudgedLabels(collection.qrels())
    return TeacherLabels(run, settings, None if settings.qrels == "ignore" else collection.qrels())


def find_label_runs(given: Sequence[str], collections: Sequence[Collection]) -> list[Path]:
    """One run for each collection: given one by one in their order, or as one folder that holds <collection>*.trec."""
    if len(given) == 1 and Path(given[0]).is_dir():
        return [_only_run_of(Path(given[0]), collection.name) for collection in collections]
    if len(given) != len(collections):
        raise InputError(
            f"`labels`: {len(given)} runs for {len(collections)} collections; give one run for each `collection`, "
            "in their order, "
            "or one folder with <collection>.*.trec"
        )
    return [Path(name) for name in given]


def _only_run_of(folder: Path, name: str) -> Path:
    found = sorted(
        path for path in folder.glob("*.trec") if path.name == f"{name}.trec" or path.name.startswith(f"{name}.")
    )
    if len(found) != 1:
        state = (
            f"no {name}.trec or {name}.*.trec"
            if not found
            else f"{' and '.join(path.name for path in found)} both belong to {name}"
        )
        raise InputError(f"{folder}: {state}; give the runs one by one with `labels` RUN")
    return found[0]
