"""Effectiveness of a run: any measure of ir-measures by its name, per query and on average, as trec_eval computes it.

Values are fractions (0.5058); only people's tables multiply by 100. A query that is judged but absent from the run
counts as zero (trec_eval -c) unless ``missing="skip"``; a query that is in the run but not judged is never counted.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection as Ids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrank.errors import InputError
from headrank.formats import Qrels, Run

Missing = Literal["zero", "skip"]
_TREC_EVAL_NAMES = {
    "map": "AP",
    "recip_rank": "RR",
    "ndcg": "nDCG",
    "map_cut_": "AP@",
    "ndcg_cut_": "nDCG@",
    "recall_": "R@",
    "P_": "P@",
}
_SPOKEN_NAMES = {"ndcg": "nDCG", "recall": "R", "mrr": "RR", "map": "AP", "precision": "P"}  # in any case


@dataclass(frozen=True)
class Evaluation:
    """One run under several measures: measure name -> query id -> value, and what was and was not counted."""

    values: Mapping[str, Mapping[str, float]]
    num_missing: int  # judged queries without results
    num_unjudged: int  # queries of the run without judgements
    num_tied: int  # queries whose order depends on how equal scores are broken

    def mean(self, measure: str) -> float:
        """The average over the counted queries."""
        return float(np.mean(list(self.values[measure].values())))

    def means(self) -> dict[str, float]:
        """Measure name -> average."""
        return {measure: self.mean(measure) for measure in self.values}


def parse_measure(name: str) -> Any:
    """The ir-measures object of a name: nDCG@10, R@2, RR(rel=2)@10, also NDCG@10, Recall@5, MRR, MAP, ndcg_cut_10."""
    import ir_measures

    spelled = _TREC_EVAL_NAMES.get(name, name)
    prefixed = re.fullmatch(r"([A-Za-z]+(?:_cut)?_)(\d+)", name)
    if prefixed and prefixed[1] in _TREC_EVAL_NAMES:
        spelled = _TREC_EVAL_NAMES[prefixed[1]] + prefixed[2]
    word, rest = re.fullmatch(r"([A-Za-z]*)(.*)", spelled, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        measure = ir_measures.parse_measure(_SPOKEN_NAMES.get(word.lower(), word) + rest)
    except (NameError, ValueError, SyntaxError, TypeError, AssertionError, KeyError, IndexError):
        raise InputError(
            f"measure {name!r} is not known; write it as ir-measures does: nDCG@10, R@5, RR@10, AP, P(rel=2)@5"
        ) from None
    cutoff = measure.params.get("cutoff", 1)
    if not isinstance(cutoff, int) or cutoff < 1:  # trec_eval ends the whole process at such a cutoff
        raise InputError(f"measure {name!r}: the cutoff {cutoff} is not a whole number of at least 1")
    return measure


def measure_name(name: str) -> str:
    """The one spelling of a measure that files and tables use: 'NDCG@10' becomes 'nDCG@10'."""
    return str(parse_measure(name))


def tied_queries(run: Run) -> list[str]:
    """Queries in which two neighbours have the same float32 score, so that trec_eval decides by document id, not by
    rank.
    """
    tied = []
    for query_id, rows in run.items():
        # float32 as in trec_eval: scores that differ in the eighth digit are equal there, and their order is not ours
        scores = np.array([row.score for row in rows], dtype=np.float32)
        if len(np.unique(scores)) < len(scores):
            tied.append(query_id)
    return tied


def evaluate_run(
    run: Run,
    qrels: Qrels,
    measures: Sequence[str],
    *,
    missing: Missing = "zero",
    by_rank: bool = False,
    query_ids: Ids[str] | None = None,
) -> Evaluation:
    """Evaluate one run.

    ``by_rank`` trusts the run's rank column instead of its scores (trec_eval trusts the scores). ``query_ids``
    restricts the average to some queries. No query left to count is an InputError.
    """
    import ir_measures

    parsed = {str(measure): measure for measure in map(parse_measure, measures)}
    judged = {
        query_id: dict(grades) for query_id, grades in qrels.items() if query_ids is None or query_id in query_ids
    }
    # counted before restricting by results: with "zero" a run that returns nothing for hard queries gains nothing
    absent = judged.keys() - run.keys()
    counted = [query_id for query_id in judged if missing == "zero" or query_id not in absent]
    if not judged.keys() & run.keys():
        raise InputError("no judged query is in the run; do the run and the judgements belong to the same collection?")
    scored = {
        # read_run gives rows by rank, so the place is the rank column's order
        query_id: {row.doc_id: (-float(place) if by_rank else row.score) for place, row in enumerate(rows)}
        for query_id, rows in run.items()
        if query_id in judged
    }
    # zeros first: ir_measures says nothing of a query that the run lacks, and leaving it out would raise the mean
    values: dict[str, dict[str, float]] = {name: dict.fromkeys(counted, 0.0) for name in parsed}
    try:
        for metric in ir_measures.iter_calc(list(parsed.values()), judged, scored):
            if metric.query_id in values[str(metric.measure)]:
                values[str(metric.measure)][metric.query_id] = float(metric.value)
    except (ValueError, RuntimeError, AttributeError, AssertionError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"measures {', '.join(parsed)} cannot all be computed here ({reason}); leave out those it names"
        ) from error
    return Evaluation(
        values=values,
        num_missing=len(absent),
        num_unjudged=sum(query_id not in qrels for query_id in run),
        num_tied=0
        if by_rank
        else len(tied_queries({query_id: run[query_id] for query_id in run if query_id in judged})),
    )
