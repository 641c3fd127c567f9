"""metrics.json of a cell: the facts of a reranking run joined with its measures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.measures import Evaluation
from headrank.evaluation.scored_lists import read_scores, with_grades
from headrank.experiments.cells import METRICS, SCORES
from headrank.formats import Qrels, read_json, write_json, write_jsonl
from headrank.methods import METHODS

META = "meta.json"
FORMAT = "headrank-metrics/1"
MAX_HEADS = 64


def make_metrics(facts: Mapping[str, Any], evaluation: Evaluation, benchmark: str) -> dict[str, Any]:
    """The document: identity first, then measures, costs and provenance as ``headrank rerank --meta`` wrote them."""
    identity = {key: facts.get(key) for key in ("model", "method", "depth", "order", "seed")}
    rest = {key: value for key, value in facts.items() if key not in identity and key != "num_queries"}
    heads = rest.get("heads")
    if isinstance(heads, list) and len(heads) > MAX_HEADS:
        rest["heads"] = f"{len(heads)} heads"  # ICR reads all of them: a list of hundreds would hide the rest
    return {
        "format": FORMAT,
        **identity,
        "benchmark": benchmark,
        "num_queries": len(next(iter(evaluation.values.values()))),
        "num_missing": evaluation.num_missing,
        "measures": evaluation.means(),
        "success_rate": success_rate(facts),
        **rest,
        "per_query": {measure: dict(values) for measure, values in evaluation.values.items()},
    }


def success_rate(facts: Mapping[str, Any]) -> float | None:
    """The share of answers in a readable format: RankGPT's own count (half of the identifiers of a window), 1 for the
    methods that write nothing and so cannot fail, None for first-stage rankers, which have no format.
    """
    success = facts.get("success")
    if isinstance(success, Mapping) and success.get("half") is not None:
        return float(success["half"])
    method = METHODS.get(str(facts.get("method", "")).partition("+")[0])
    return 1.0 if method is not None and method.kind == "attention" else None


def read_facts(run_path: str | os.PathLike[str]) -> dict[str, Any]:
    """meta.json beside a run; without one the run's directory names the method and nothing else is known."""
    path = Path(run_path).parent / META
    if not path.is_file():
        return {"method": Path(run_path).resolve().parent.name}
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise InputError(f"{path}: expected the JSON object that 'headrank rerank --meta' writes")
    return facts


def write_metrics(
    run_path: str | os.PathLike[str], facts: Mapping[str, Any], evaluation: Evaluation, qrels: Qrels, benchmark: str
) -> Path:
    """Write metrics.json beside a run, and put the judgements into scores.jsonl so that the analyses need nothing
    else.
    """
    folder = Path(run_path).parent
    if (folder / SCORES).is_file():
        rows = read_scores(folder / SCORES)
        judged = {row.query_id: row for row in with_grades(rows, qrels)}
        write_jsonl(
            folder / SCORES, (judged.get(row.query_id, dataclasses.replace(row, grades=None)).to_dict() for row in rows)
        )
    write_json(folder / METRICS, make_metrics(facts, evaluation, benchmark))
    return folder / METRICS
