"""What a teacher is, and which of the four kinds a name means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrank.errors import InputError
from headrank.formats import Document

KINDS = ("cross-encoder", "onnx", "endpoint", "headrank")
QueryList = tuple[str, Sequence[Document]]  # a query's text and its passages


class Teacher(Protocol):
    """Anything that scores passages for a query; higher is better, the scale is its own."""

    def identity(self) -> dict[str, Any]:
        """What decides its scores, as plain JSON values without secrets or paths."""

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        """The raw scores float64 [N] of every list, in the order its passages were given."""


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher as the command line names it. ``kind`` 'auto' follows from the name."""

    name: str
    kind: str = "auto"
    max_tokens: int = 320  # of query and passage together
    batch_size: int | None = None  # passages per forward; None: what suits the kind of teacher
    max_words: int | None = None  # of a passage, for teachers whose tokenizer is elsewhere
    device: str | None = None
    api_model: str | None = None
    api_key: str | None = None
    heads: str | None = None


def kind_of(spec: TeacherSpec) -> str:
    """The kind of a teacher: as given, or from its name and what lies in its folder."""
    if spec.kind != "auto":
        return spec.kind
    if spec.name.startswith(("http://", "https://")):
        return "endpoint"
    folder = Path(spec.name)
    if spec.name == "embedded" or (folder / "headrank.json").is_file() or spec.heads is not None:
        return "headrank"
    return "onnx" if onnx_file(folder) is not None else "cross-encoder"


def onnx_file(folder: Path) -> Path | None:
    """The model of an ONNX folder, where exporters put it."""
    return next((path for path in (folder / "model.onnx", folder / "onnx" / "model.onnx") if path.is_file()), None)


def open_teacher(spec: TeacherSpec) -> Teacher:
    """Load the teacher. Each kind is imported only here, because each needs another package."""
    kind = kind_of(spec)
    if kind == "onnx":
        from data_tools.teachers.onnx_folder import OnnxTeacher

        return OnnxTeacher(spec)
    if kind == "endpoint":
        from data_tools.teachers.endpoint import EndpointTeacher

        return EndpointTeacher(spec)
    if kind == "headrank":
        from data_tools.teachers.headrank_model import HeadRankTeacher

        return HeadRankTeacher(spec)
    if kind == "cross-encoder":
        from data_tools.teachers.cross_encoder import CrossEncoderTeacher

        return CrossEncoderTeacher(spec)
    raise InputError(f"`teacher_kind` {kind!r}: not one of {', '.join(KINDS)}")


def passage_text(document: Document, max_words: int | None = None) -> str:
    """A passage as cross-encoders read it: the title on a line of its own, then the text; ``max_words`` cuts the
    text.
    """
    text = document.text if max_words is None else " ".join(document.text.split()[:max_words])
    return f"{document.title}\n{text}" if document.title else text
