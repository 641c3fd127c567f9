"""Measures: names, missing and unjudged queries, ties, and equality with trec_eval on real runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.evaluation.measures import evaluate_run, measure_name, tied_queries
from headrank.formats import Candidate, Qrels, Run, read_qrels, read_run

TREC_EVAL_NAMES = {
    "nDCG@10": "ndcg_cut_10",
    "R@2": "recall_2",
    "R@5": "recall_5",
    "RR": "recip_rank",
    "AP": "map",
    "P@5": "P_5",
}


def make_run(**lists: list[str]) -> Run:
    return {
        query: [Candidate(doc, rank, 100.0 - rank) for rank, doc in enumerate(docs, 1)] for query, docs in lists.items()
    }


QRELS: Qrels = {"a": {"x": 3, "y": 1, "z": 0}, "b": {"x": 1}}


def test_ndcg_of_a_hand_made_list_is_dcg_over_ideal_dcg() -> None:
    values = evaluate_run(make_run(a=["y", "z", "x"]), {"a": QRELS["a"]}, ["nDCG@10"]).values["nDCG@10"]
    assert values["a"] == pytest.approx((1 + 3 / math.log2(4)) / (3 + 1 / math.log2(3)))


def test_recall_and_reciprocal_rank_of_a_hand_made_list() -> None:
    means = evaluate_run(make_run(a=["z", "y", "x"]), {"a": QRELS["a"]}, ["R@2", "RR"]).means()
    assert means == pytest.approx({"R@2": 0.5, "RR": 0.5})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("NDCG@10", "nDCG@10"),
        ("Recall@5", "R@5"),
        ("MRR", "RR"),
        ("MAP", "AP"),
        ("ndcg_cut_10", "nDCG@10"),
        ("recip_rank", "RR"),
        ("P_5", "P@5"),
        ("recall@2", "R@2"),
        ("mrr@10", "RR@10"),
    ],
)
def test_common_spellings_name_the_same_measure(given: str, expected: str) -> None:
    assert measure_name(given) == expected


@pytest.mark.parametrize("name", ["nDCG@0", "P@1.5", "ndcg_cut_0"])
def test_a_cutoff_that_would_crash_trec_eval_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}': the cutoff .* is not a whole number of at least 1"):
        measure_name(name)


def test_an_unknown_measure_names_itself_and_the_notation() -> None:
    with pytest.raises(InputError, match=r"'nDGC@10' is not known.*nDCG@10"):
        measure_name("nDGC@10")


def test_a_missing_query_counts_as_zero_unless_skipped() -> None:
    run = make_run(a=["x", "y", "z"])
    counted = evaluate_run(run, QRELS, ["nDCG@10"])
    assert counted.mean("nDCG@10") == pytest.approx(0.5)
    assert counted.num_missing == 1
    assert evaluate_run(run, QRELS, ["nDCG@10"], missing="skip").mean("nDCG@10") == pytest.approx(1.0)


def test_an_unjudged_query_is_reported_and_never_counted() -> None:
    result = evaluate_run(make_run(a=["x"], b=["x"], c=["x"]), QRELS, ["RR"])
    assert result.num_unjudged == 1
    assert set(result.values["RR"]) == {"a", "b"}


def test_query_ids_restrict_the_average() -> None:
    assert set(evaluate_run(make_run(a=["x"], b=["y"]), QRELS, ["RR"], query_ids={"b"}).values["RR"]) == {"b"}


def test_a_run_of_another_collection_is_refused() -> None:
    with pytest.raises(InputError, match="same collection"):
        evaluate_run(make_run(other=["x"]), QRELS, ["RR"], missing="skip")


def test_ties_are_counted_and_broken_by_document_id_unless_ranks_are_trusted() -> None:
    run: Run = {"b": [Candidate("x", 1, 1.0), Candidate("y", 2, 1.0 + 1e-9)]}  # equal as float32
    qrels: Qrels = {"b": {"x": 1}}
    result = evaluate_run(run, qrels, ["RR"])
    assert tied_queries(run) == ["b"]
    assert result.num_tied == 1
    assert result.mean("RR") == pytest.approx(0.5)  # trec_eval puts y before x
    assert evaluate_run(run, qrels, ["RR"], by_rank=True).mean("RR") == pytest.approx(1.0)


def trec_eval_means(qrels: Qrels, run: Run, names: list[str]) -> dict[str, float]:
    """trec_eval itself (pytrec_eval is its C code), averaged with -c: over every judged query."""
    import pytrec_eval

    evaluator = pytrec_eval.RelevanceEvaluator(qrels, set(names))
    results = evaluator.evaluate({query: {row.doc_id: row.score for row in rows} for query, rows in run.items()})
    return {name: sum(values[name] for values in results.values()) / len(qrels) for name in names}


@pytest.mark.parametrize("collection", ["dl19", "nfcorpus", "hotpotqa100"])
def test_values_equal_trec_eval_on_real_runs(shared_data: Path, collection: str) -> None:
    qrels, run = read_qrels(shared_data / collection / "qrels.txt"), read_run(shared_data / collection / "run.bm25.txt")
    means = evaluate_run(run, qrels, list(TREC_EVAL_NAMES)).means()
    expected = trec_eval_means(qrels, run, list(TREC_EVAL_NAMES.values()))
    assert means == pytest.approx({name: expected[trec_name] for name, trec_name in TREC_EVAL_NAMES.items()}, abs=1e-9)


def test_bm25_on_dl19_is_the_papers_row(shared_data: Path) -> None:
    result = evaluate_run(
        read_run(shared_data / "dl19" / "run.bm25.txt"), read_qrels(shared_data / "dl19" / "qrels.txt"), ["NDCG@10"]
    )
    assert round(100 * result.mean("nDCG@10"), 2) == 50.58


def test_nfcorpus_depends_on_whether_queries_without_results_count(shared_data: Path) -> None:
    qrels, run = read_qrels(shared_data / "nfcorpus" / "qrels.txt"), read_run(shared_data / "nfcorpus" / "run.bm25.txt")
    means = {
        missing: evaluate_run(run, qrels, ["nDCG@10"], missing=missing).mean("nDCG@10") for missing in ("zero", "skip")
    }
    assert {name: round(100 * value, 2) for name, value in means.items()} == {"zero": 32.18, "skip": 33.75}
