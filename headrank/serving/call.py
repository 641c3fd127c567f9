"""What every dialect is translated into, and what it translates its answer from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrank.serving.highlights import Sentence

Json = dict[str, Any]


@dataclass(frozen=True)
class RerankCall:
    """One list to rank. ``documents`` are (title, text); None leaves a choice to the server."""

    query: str
    documents: tuple[tuple[str, str], ...]
    top_n: int | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    keeps_end: bool = False  # long documents lose their beginning
    may_cut: bool = True  # else a document that does not fit is an error
    threshold: float | None = None  # results below it are left out
    wants_raw: bool = False  # the model's score, although there is a curve to relevance
    wants_highlights: bool = False
    field: str = "documents"  # the name of the documents in this dialect, for errors


@dataclass(frozen=True)
class Ranked:
    """One document of an answer. ``score`` is the relevance where the server has a curve, and then ``raw_score`` is
    the model's.
    """

    index: int
    score: float
    raw_score: float | None = None
    is_cut: bool = False
    chunk: tuple[int, int] | None = None  # characters of the chunk that scored best, of several
    sentences: tuple[Sentence, ...] = ()

    def extras(self) -> Json:
        """What the dialect does not know, and clients may read: only where there is something to say."""
        from headrank.serving.highlights import pruned_text

        more: Json = {}
        if self.raw_score is not None:
            more["raw_score"] = self.raw_score
        if self.is_cut:
            more["is_truncated"] = True
        if self.chunk is not None:
            more["chunk"] = {"start": self.chunk[0], "end": self.chunk[1]}
        if self.sentences:
            more["highlights"] = [sentence.to_json() for sentence in self.sentences]
            more["pruned_text"] = pruned_text(self.sentences)
        return more


@dataclass(frozen=True)
class RerankAnswer:
    """Documents best first, cut at top_n; ties keep the order of the request."""

    ranked: tuple[Ranked, ...]
    num_tokens: int
    is_shortened: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)  # queue, inference, tokenization, total

    @property
    def headers(self) -> dict[str, str]:
        """Where the time went, in TEI's headers (milliseconds)."""
        times = {f"x-{name}-time": str(round(1000 * value)) for name, value in self.seconds.items()}
        return {"x-compute-tokens": str(self.num_tokens), **times}
