"""The collection that comes with the project is sound, and what its README says about it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.evaluation.measures import evaluate_run
from headrank.formats import Candidate, Collection, Qrels, Run, read_query_ids, read_run

MIN_QUERIES, MIN_PASSAGES, GRADES = 60, 12, {0, 1, 2, 3}


@pytest.fixture(scope="module")
def collection(embedded_collection: Path) -> Collection:
    return Collection.open(embedded_collection)


def test_it_is_large_enough(collection: Collection) -> None:
    queries, qrels = collection.queries(), collection.qrels()
    assert len(queries) >= MIN_QUERIES
    assert all(len(qrels[query_id]) >= MIN_PASSAGES for query_id in queries)


def test_ids_join(collection: Collection) -> None:
    queries, documents = collection.queries(), collection.documents()
    assert set(collection.qrels()) == set(queries) == set(collection.run())
    assert {doc_id for judged in collection.qrels().values() for doc_id in judged} == set(documents)
    assert {row.doc_id for rows in collection.run().values() for row in rows} <= set(documents)


def test_grades_are_in_range_and_every_adjacent_pair_is_judged_for_every_query(collection: Collection) -> None:
    assert all(set(judged.values()) == GRADES for judged in collection.qrels().values())


def test_most_candidate_lists_hold_every_adjacent_pair_of_grades(collection: Collection) -> None:
    qrels, run = collection.qrels(), collection.run()
    complete = [
        query_id for query_id, rows in run.items() if {qrels[query_id].get(row.doc_id, 0) for row in rows} == GRADES
    ]
    assert len(complete) > len(run) / 2


def test_no_passage_appears_twice(collection: Collection) -> None:
    texts = [re.sub(r"\W+", " ", document.text).lower().strip() for document in collection.documents().values()]
    assert len(set(texts)) == len(texts) and all(texts)


def test_no_query_appears_twice(collection: Collection) -> None:
    assert len({text.lower() for text in collection.queries().values()}) == len(collection.queries())


def test_the_split_is_disjoint_complete_and_by_whole_topics(collection: Collection, embedded_collection: Path) -> None:
    train, held_out = (read_query_ids(str(embedded_collection / f"{name}.qids")) for name in ("train", "heldout"))
    assert not train & held_out
    assert train | held_out == set(collection.queries())
    topics = [
        {line.split("\t")[1] for line in (embedded_collection / f"{name}.qids").read_text().splitlines()}
        for name in ("train", "heldout")
    ]
    assert not topics[0] & topics[1]


def test_no_passage_is_judged_for_queries_on_both_sides_of_the_split(
    collection: Collection, embedded_collection: Path
) -> None:
    held_out = read_query_ids(str(embedded_collection / "heldout.qids"))
    sides: dict[str, set[bool]] = {}
    for query_id, judged in collection.qrels().items():
        for doc_id in judged:
            sides.setdefault(doc_id, set()).add(query_id in held_out)
    assert all(len(side) == 1 for side in sides.values())


def test_document_ids_do_not_reveal_the_grade(collection: Collection) -> None:
    relevant = sorted(
        {doc_id for judged in collection.qrels().values() for doc_id, grade in judged.items() if grade == 3}
    )
    order = sorted(collection.documents())
    mean_place = sum(order.index(doc_id) for doc_id in relevant) / len(relevant) / len(order)
    assert 0.4 < mean_place < 0.6


def test_bm25_falls_into_traps_on_most_queries(collection: Collection) -> None:
    qrels = collection.qrels()
    trapped = [
        query_id
        for query_id, rows in collection.run().items()
        if any(qrels[query_id].get(row.doc_id) == 0 for row in rows[:3])
    ]
    assert len(trapped) > len(qrels) / 2


def test_the_run_is_what_headrank_retrieve_makes(embedded_collection: Path, tmp_path: Path) -> None:
    made = tmp_path / "run.txt"
    assert main(["retrieve", "--collection", str(embedded_collection), "--top-k", "20", "--output", str(made)]) == 0
    fresh, kept = read_run(made), read_run(embedded_collection / "run.bm25.txt")
    assert {query_id: [row.doc_id for row in rows] for query_id, rows in fresh.items()} == {
        query_id: [row.doc_id for row in rows] for query_id, rows in kept.items()
    }
    for query_id, rows in kept.items():
        assert [row.score for row in fresh[query_id]] == pytest.approx([row.score for row in rows], abs=1e-4)


def test_the_readme_states_the_measured_numbers(collection: Collection, embedded_collection: Path) -> None:
    held_out = read_query_ids(str(embedded_collection / "heldout.qids"))
    qrels = {query_id: judged for query_id, judged in collection.qrels().items() if query_id in held_out}
    run = {query_id: rows for query_id, rows in collection.run().items() if query_id in held_out}
    best = {
        query_id: [
            Candidate(doc_id, rank, -rank)
            for rank, doc_id in enumerate(
                sorted((row.doc_id for row in rows), key=lambda d: -qrels[query_id].get(d, 0)), start=1
            )
        ]
        for query_id, rows in run.items()
    }
    readme = (embedded_collection / "README.md").read_text()
    assert f"NDCG@10 of {mean_ndcg(run, qrels):.1f}" in readme
    assert f"candidates has {mean_ndcg(best, qrels):.1f}" in readme


def mean_ndcg(run: Run, qrels: Qrels) -> float:
    return 100 * evaluate_run(run, qrels, ["nDCG@10"]).mean("nDCG@10")
