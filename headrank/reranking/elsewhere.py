"""Lists that are scored in other processes: what a reranking job asks of them, and what it knows of their rankers
without loading one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrank.methods import find_method
from headrank.reranking import shipped_readouts

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet
    from headrank.method.prompt import PromptTemplate
    from headrank.reranking.rerank_job import RerankJob
    from headrank.reranking.rerank_requests import Request


class Elsewhere(Protocol):
    """Other processes that score the lists of a job."""

    def rows(self, job: RerankJob, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        """The result line of every list, each once, in any order."""

    def facts(self) -> dict[str, Any]:
        """What the job's facts say about these processes; ``engine`` is their name."""


@dataclass(frozen=True)
class RankerOutline:
    """What the facts of a run say about a ranker: its heads and prompt, without weights."""

    heads: HeadSet | None
    prompt: PromptTemplate | None

    @property
    def layers_used(self) -> int | None:
        """Layers computed for a query."""
        return self.heads.l_max + 1 if self.heads is not None else None


def outlines(job: RerankJob) -> list[RankerOutline]:
    """What the targets will be read with, from configurations alone."""
    from headrank.reranking.reranker import choose_heads

    found = []
    for target in job.targets:
        method, heads = find_method(target.method), None
        own = target.heads or ("all" if method.name == "icr" else None)
        if method.kind == "attention":
            heads = choose_heads(shipped_readouts.model_to_read(job.model, own), own)
            heads = dataclasses.replace(heads, prompt=dataclasses.replace(heads.prompt, **job.prompt))
        found.append(RankerOutline(heads, heads.prompt if heads is not None else None))
    return found
