"""Core head selection (Eq. 2-4) over judged collections: contexts, contrasts, and the loop every attention policy
shares.

Shapes: L layers read, H heads, N documents. A policy sees the head statistics of one context at a time, keeps running
means and ends as named columns [L, H]; the last column is the one that ranks the heads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection as Ids
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.method.heads import HeadSet, discriminability, entropy_gate, head_name, top_heads
from headrank.method.ordering import order_numbers, selection_order
from headrank.method.prompt import PromptTemplate
from headrank.provenance import versions
from headrank.reranking.reader import AttentionReader
from headrank.selection.statistics import HeadStatistics, StatisticsCache, head_statistics

Grades = tuple[int | None, ...]  # in prompt order; None where nobody judged the document
CONTRASTS = ("adjacent", "lower", "irrelevant")
TEMPERATURE = 0.001  # tau, the paper's appendix
ENTROPY_WEIGHT = 0.1  # lambda, the paper's appendix


@dataclass(frozen=True)
class SelectionContext:
    """One judged candidate list in prompt order. ``order`` 0 is the retriever's order, 1, 2, ... are random ones."""

    collection: str
    query_id: str
    order: int
    query: str
    documents: tuple[tuple[str, str], ...]  # (title, text)
    grades: Grades


@dataclass(frozen=True)
class Contrast:
    """What a chosen document d+ is compared with, and what the comparisons of a query count.

    adjacent: every d+ of grade g >= 1 with the documents of grade g - 1 (ALPS). lower: with those of all lower grades,
    as random pairs are drawn (the ablation without ALPS). irrelevant: every d+ of grade ``gold_grade`` or above with
    those of grade 0 (as CoRe). With ``per_query`` the mean is over queries, of each query's mean over its d+; otherwise
    a query with many d+ counts as often.
    """

    kind: str = "adjacent"
    gold_grade: int = 1
    per_query: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CONTRASTS:
            raise InputError(f"`contrast` {self.kind!r} is not one of {', '.join(CONTRASTS)}")
        if self.gold_grade < 1:
            raise InputError(f"`gold_grade` {self.gold_grade} must be at least 1")

    def find(self, grades: Grades) -> list[tuple[int, list[int]]]:
        """Every d+ with its D-: index lists. A d+ without D- gives nothing."""
        found = []
        for positive, grade in enumerate(grades):
            if grade is not None and grade >= (self.gold_grade if self.kind == "irrelevant" else 1):
                negatives = [
                    index for index, other in enumerate(grades) if other is not None and self._is_negative(other, grade)
                ]
                if negatives:
                    found.append((positive, negatives))
        return found

    def _is_negative(self, other: int, grade: int) -> bool:
        if self.kind == "irrelevant":
            return other == 0
        return other == grade - 1 if self.kind == "adjacent" else other < grade

    def settings(self) -> dict[str, Any]:
        """For heads.json."""
        values: dict[str, Any] = {"contrast": self.kind, "per_query": self.per_query}
        return values | ({"gold_grade": self.gold_grade} if self.kind == "irrelevant" else {})


def collection_contexts(
    collection: Collection,
    template: PromptTemplate,
    *,
    depth: int,
    permutations: int = 0,
    with_retriever_order: bool = True,
    seed: int = 0,
    only: Ids[str] | None = None,
    hold_out: Ids[str] = (),
) -> list[SelectionContext]:
    """The top ``depth`` candidates of every judged query, in retriever order and in ``permutations`` random orders.

    A query's random orders depend on the seed and its own id, not on which other queries are selected. Negative grades
    (TREC's mark for spam) count as 0. Queries without candidates or judgements are left out.
    """
    queries, qrels, run = collection.queries(), collection.qrels(), collection.run()
    chosen = [
        query_id
        for query_id in queries
        if query_id in run and query_id in qrels and query_id not in hold_out and (only is None or query_id in only)
    ]
    if not chosen:
        raise InputError(
            f"collection {collection.name}: no query with candidates and judgements is left; check `only`, "
            "`hold_out` and the run"
        )
    corpus = collection.documents({candidate.doc_id for query_id in chosen for candidate in run[query_id][:depth]})
    contexts = []
    for order in order_numbers(permutations, with_retriever_order):
        for query_id in chosen:
            candidates = [candidate.doc_id for candidate in run[query_id][:depth]]
            ranks = selection_order(template, len(candidates), seed=seed, list_id=query_id, number=order)
            listed = [candidates[rank] for rank in ranks]
            grades = (qrels[query_id].get(doc_id) for doc_id in listed)
            contexts.append(
                SelectionContext(
                    collection=collection.name,
                    query_id=query_id,
                    order=order,
                    query=queries[query_id],
                    documents=tuple((corpus[doc_id].title, corpus[doc_id].text) for doc_id in listed),
                    grades=tuple(None if grade is None else max(grade, 0) for grade in grades),
                )
            )
    return contexts


class RankedHeads(Protocol):
    """What a finished selection can tell, however it looked at the model."""

    name: str
    top_k: int  # how many heads its own paper keeps

    def settings(self) -> dict[str, Any]:
        """The switches, for heads.json."""

    def columns(self) -> dict[str, np.ndarray]:
        """Named values [L, H] of every head; the last one ranks."""


class HeadPolicy(RankedHeads, Protocol):
    """A way to rank heads by head statistics: CoRe, QR and the entropy-regularised selection differ in nothing but
    this.
    """

    def uses(self, context: SelectionContext) -> bool:
        """Whether this context has what the policy measures; one that no policy uses is not run."""

    def add(self, context: SelectionContext, statistics: HeadStatistics) -> None:
        """Take one context into the means."""


class RunningMean:
    """A mean of float64 arrays that is fed one array at a time; with ``by_group`` the mean of the means of its
    groups.
    """

    def __init__(self, by_group: bool = False) -> None:
        self.by_group, self.count = by_group, 0
        self._sums: dict[Hashable, tuple[np.ndarray, int]] = {}

    def add(self, values: torch.Tensor | np.ndarray, group: Hashable = None) -> None:
        """Add one array; all have the same shape."""
        key = group if self.by_group else None
        array = np.asarray(values, dtype=np.float64)
        total, count = self._sums.get(key, (np.zeros_like(array), 0))
        self._sums[key] = (total + array, count + 1)
        self.count += 1

    def value(self, what: str) -> np.ndarray:
        """The mean; nothing added is the user's error."""
        if not self._sums:
            raise InputError(
                f"nothing to select heads from: no context has {what}; give more queries, more `depth` or other "
                "judgements"
            )
        return np.mean([total / count for total, count in self._sums.values()], axis=0)


class EntropySelection:
    """HeadRank's selection: Phi = mean S_disc x mean G_ent (Eq. 2-4), over every d+ and every context that has one."""

    name, top_k = "entropy", 8

    def __init__(
        self,
        temperature: float = TEMPERATURE,
        entropy_weight: float = ENTROPY_WEIGHT,
        is_calibrated: bool = False,
        contrast: Contrast | None = None,
    ) -> None:
        """``temperature`` is tau, ``entropy_weight`` is lambda; masses are uncalibrated as in CoRe unless said
        otherwise.
        """
        if not 0 < temperature < math.inf:
            raise InputError(f"`temperature` {temperature} must be a number above 0")
        if not math.isfinite(entropy_weight):
            raise InputError(f"`entropy_weight` {entropy_weight} must be a finite number")
        self.temperature, self.entropy_weight, self.is_calibrated = temperature, entropy_weight, is_calibrated
        self.contrast = contrast or Contrast()
        self.scores, self.gates = RunningMean(self.contrast.per_query), RunningMean()

    def settings(self) -> dict[str, Any]:
        """tau, lambda, the kind of mass and the contrast."""
        values = {
            "temperature": self.temperature,
            "entropy_weight": self.entropy_weight,
            "is_calibrated": self.is_calibrated,
        }
        return values | self.contrast.settings()

    @property
    def wanted(self) -> str:
        """What a list must have, in words."""
        return {
            "adjacent": "documents of adjacent grades",
            "lower": "documents of different grades",
            "irrelevant": f"a document of grade {self.contrast.gold_grade} or above and one of grade 0",
        }[self.contrast.kind]

    def uses(self, context: SelectionContext) -> bool:
        """Whether the list has documents to compare."""
        return bool(self.contrast.find(context.grades))

    def add(self, context: SelectionContext, statistics: HeadStatistics) -> None:
        """One S_disc for every d+ of the context, one G_ent for the context."""
        masses_LHN = statistics.masses(self.is_calibrated)
        for positive, negatives in self.contrast.find(context.grades):
            score_LH = discriminability(masses_LHN, positive, negatives, self.temperature)
            self.scores.add(score_LH, (context.collection, context.query_id))
        self.gates.add(
            entropy_gate(torch.from_numpy(statistics.entropy_LH), statistics.sequence_length, self.entropy_weight)
        )

    def columns(self) -> dict[str, np.ndarray]:
        """S, G and Phi."""
        score_LH, gate_LH = self.scores.value(self.wanted), self.gates.value(self.wanted)
        return {"S": score_LH, "G": gate_LH, "phi": score_LH * gate_LH}


def accumulate(
    reader: AttentionReader,
    contexts: Iterable[SelectionContext],
    policies: Sequence[HeadPolicy],
    *,
    num_layers: int | None = None,
    batch_size: int = 1,
    cache: StatisticsCache | None = None,
) -> dict[str, Any]:
    """Feed every context to every policy that uses it, one forward per context, and return the facts for ``source``.

    Contexts are added in the order given, cached or not, so a resumed run gives the same bytes. Wrap ``contexts`` in a
    progress bar to show one.
    """
    used, queries, digest = 0, set(), hashlib.sha256()
    for batch in _batches(contexts, policies, batch_size):
        for context, statistics in zip(
            batch, _statistics(reader, batch, num_layers or reader.num_layers, cache), strict=True
        ):
            for policy in policies:
                if policy.uses(context):
                    policy.add(context, statistics)
            used += 1
            queries.add((context.collection, context.query_id))
            digest.update(json.dumps([context.query, context.documents, context.grades]).encode())
    return {"queries": len(queries), "contexts": used, "contexts_sha256": digest.hexdigest()}


def _batches(
    contexts: Iterable[SelectionContext], policies: Sequence[HeadPolicy], size: int
) -> Iterator[list[SelectionContext]]:
    batch: list[SelectionContext] = []
    for context in contexts:
        if any(policy.uses(context) for policy in policies):
            batch.append(context)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _statistics(
    reader: AttentionReader, batch: Sequence[SelectionContext], num_layers: int, cache: StatisticsCache | None
) -> list[HeadStatistics]:
    """The statistics of a batch: from the cache where they are, from one forward for the others."""
    encoded = reader.encoder.encode_many([(context.query, context.documents) for context in batch])
    found = [cache.load(context, num_layers) if cache else None for context in encoded]
    missing = [index for index, statistics in enumerate(found) if statistics is None]
    if missing:
        computed = head_statistics(reader, [encoded[index] for index in missing], num_layers)
        for index, statistics in zip(missing, computed, strict=True):
            if not (np.isfinite(statistics.raw_LHN).all() and np.isfinite(statistics.calibrated_LHN).all()):
                raise InputError(
                    f"{reader.name}: attention is not finite for query {batch[index].query!r}; the weights hold NaN "
                    "or infinity"
                )
            if cache:
                cache.save(encoded[index], statistics)
            found[index] = statistics
    return [statistics for statistics in found if statistics is not None]


def make_head_set(
    policy: RankedHeads,
    *,
    model: str,
    num_layers: int,
    num_heads: int,
    prompt: PromptTemplate,
    top_k: int | None = None,
    settings: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
) -> HeadSet:
    """The policy's best K heads with the ranked table of all heads it has seen; ``num_layers`` is the whole model's.

    ``settings`` are added to the policy's own, ``source`` says what was read; versions are added to it.
    """
    columns = policy.columns()
    ranking_LH = torch.from_numpy(list(columns.values())[-1])
    ranked = top_heads(ranking_LH, ranking_LH.numel())
    heads = top_heads(ranking_LH, top_k or policy.top_k)
    table = [
        {"rank": rank, "name": head_name(head), "layer": head[0], "head": head[1], "is_chosen": rank <= len(heads)}
        | {name: _rounded(values[head]) for name, values in columns.items()}
        for rank, head in enumerate(ranked, start=1)
    ]
    return HeadSet(
        heads=heads,
        method=policy.name,
        model=model,
        num_layers=num_layers,
        num_heads=num_heads,
        prompt=prompt,
        settings={**policy.settings(), **(settings or {})},
        source={**(source or {}), "versions": versions()},
        table=tuple(table),
    )


def _rounded(value: float) -> float:
    """Six significant digits: enough to compare heads, short enough to read."""
    return float(f"{value:.6g}")
