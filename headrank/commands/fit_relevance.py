"""Fit the curve from a score to the chance that a passage is relevant, on judged lists; 'headrank serve' answers with
it.

  headrank rerank --collection DIR --model M --output run.txt --scores scores.jsonl
  headrank fit-relevance --scores scores.jsonl --qrels DIR/qrels.txt --output relevance.json

The curve is written to --output, or with --model DIR into that model's headrank.json, where 'headrank serve' finds it.
No model is read: the scores must be those of its own heads. The curve never changes an order: it gives thresholds a
meaning. Candidates that nobody judged are left out unless --unjudged-as-other. The printed numbers come from five folds
of queries, each judged by a curve that has not seen its queries.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from headrank.commands import options
from headrank.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from headrank.method.relevance import RelevanceCurve

_FOLDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank fit-relevance`."""
    parser.add_argument("--scores", metavar="FILE", required=True, help="scores.jsonl of 'headrank rerank --scores'")
    parser.add_argument("--qrels", metavar="FILE", required=True, help="TREC judgements")
    parser.add_argument(
        "--relevant-from",
        type=int,
        default=1,
        metavar="G",
        help="lowest grade that is relevant (default 1; TREC DL: 2)",
    )
    parser.add_argument(
        "--unjudged-as-other", action="store_true", help="count candidates that nobody judged as not relevant"
    )
    parser.add_argument(
        "--kind",
        choices=("platt", "isotonic"),
        default="platt",
        help="platt: a sigmoid (default); isotonic: any rising curve, for many judgements",
    )
    parser.add_argument("--output", metavar="FILE", help="the curve, as JSON")
    parser.add_argument("--model", metavar="DIR", help="an exported model whose headrank.json shall keep the curve")
    parser.add_argument("--seed", type=options.seed, default=0, metavar="N", help="of the folds (default 0)")


def run(args: argparse.Namespace) -> int:
    """Fit, judge and write; returns the exit code."""
    import numpy as np

    from headrank.evaluation.scored_lists import read_scores, with_grades
    from headrank.files import require_writable, write_json
    from headrank.formats import read_qrels
    from headrank.method.relevance import fit_isotonic, fit_platt, quality
    from headrank.reranking.exported_model import keep_relevance, require_exported

    if args.output is None and args.model is None:
        raise InputError("nowhere to write the curve; give `output` FILE, or `model` DIR for its headrank.json")
    if args.output is not None:
        require_writable(args.output, reads=[args.scores, args.qrels])
    if args.model is not None:
        require_exported(args.model)
    scores, labels, queries = [], [], []
    for number, row in enumerate(with_grades(read_scores(args.scores), read_qrels(args.qrels))):
        for score, grade in zip(row.scores, row.grades or (), strict=True):
            if grade is not None or args.unjudged_as_other:
                scores.append(score)
                labels.append(grade is not None and grade >= args.relevant_from)
                queries.append(number)
    if len(set(queries)) < _FOLDS:
        raise InputError(
            f"{args.scores}: {len(set(queries))} of its queries are judged in {args.qrels}; at least {_FOLDS} are "
            "needed"
        )
    fit = fit_platt if args.kind == "platt" else fit_isotonic
    s, y, q = np.array(scores), np.array(labels), np.array(queries)
    unseen = unseen_relevance(fit, s, y, q, np.random.default_rng(args.seed))
    facts: dict[str, Any] = {
        "queries": len(set(queries)),
        "judged": len(s),
        "relevant": int(y.sum()),
        "relevant_from": args.relevant_from,
    }
    facts |= {"unjudged_as_other": args.unjudged_as_other, "folds": _FOLDS, "unseen": quality(unseen, y)}
    curve = dataclasses.replace(fit(s, y), fit=facts)
    if args.output is not None:
        write_json(args.output, curve.to_dict())
    if args.model is not None:
        keep_relevance(args.model, curve.to_dict())
    print(summary(args.output or f"{args.model}/headrank.json", curve), file=sys.stderr)
    return 0


def unseen_relevance(
    fit: Any, scores: np.ndarray, labels: np.ndarray, queries: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """The relevance of each candidate by a curve fitted without its fold of queries."""
    import numpy as np

    numbers = random.permutation(np.unique(queries))
    unseen = np.zeros(len(scores))
    for fold in np.array_split(numbers, _FOLDS):
        held = np.isin(queries, fold)
        unseen[held] = fit(scores[~held], labels[~held]).of(scores[held])
    return unseen


def summary(output: str, curve: RelevanceCurve) -> str:
    """One line for people."""
    fit = curve.fit
    unseen = fit["unseen"]
    return (
        f"{output}: {curve.kind} on {fit['judged']} judged candidates of {fit['queries']} queries, "
        f"{fit['relevant']} relevant; unseen "
        f"queries: AUC {unseen['auc']:.3f}, Brier {unseen['brier']:.3f} (base rate "
        f"{unseen['brier_of_base_rate']:.3f}), "
        f"calibration error {unseen['calibration_error']:.3f}"
    )
