"""Labels of a teacher: scores become grades and ALPS pairs, every document keeps its score and whose its grade is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.contexts import iterate_contexts
from data_tools.labels.grades import GradeSettings, grades_from_scores, merged_grade
from data_tools.pairs import adjacent_pairs, sample_strata
from data_tools.training_set import TrainingSet
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import write_run
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from headrank.seeds import generator
from tests.tiny_models import tiny_tokenizer
from tests.toy_collections import make_collection

BOUNDED = settings(max_examples=50, deadline=None)
score_batch = st.lists(st.floats(-12, 12, width=16), min_size=1, max_size=25)
boundary_lists = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4, unique=True).map(
    lambda values: tuple(sorted(values))
)


def slow_quantile_grades(scores: list[float], quantiles: tuple[float, ...]) -> list[int]:
    """A score reaches a quantile when it is at least the first score, from below, with that share of the gaps
    beneath it.
    """
    ascending = sorted(scores)
    reached = [ascending[math.ceil(round(quantile * (len(scores) - 1), 9))] for quantile in quantiles]
    return [sum(score >= level for level in reached) for score in scores]


@BOUNDED
@given(scores=score_batch, quantiles=boundary_lists)
def test_quantile_grades_equal_a_count_over_the_sorted_list(scores: list[float], quantiles: tuple[float, ...]) -> None:
    found = grades_from_scores(scores, GradeSettings("quantiles", quantiles))
    expected = slow_quantile_grades(scores, quantiles)
    # a quantile that falls on a place of the list may be a rounding error off it
    if not any(math.isclose(place := q * (len(scores) - 1), round(place), abs_tol=1e-6) for q in quantiles):
        assert found == expected


def test_sixteen_scores_give_eight_four_two_and_two_by_default() -> None:
    assert grades_from_scores(range(16), GradeSettings()) == [0] * 8 + [1] * 4 + [2] * 2 + [3] * 2


def test_thresholds_are_on_the_teachers_own_scale() -> None:
    by_hand = GradeSettings("thresholds", (-4.0, 0.0, 4.0))
    assert grades_from_scores([-9.0, -4.0, -0.1, 0.0, 3.9, 7.0], by_hand) == [0, 1, 1, 2, 2, 3]
    assert grades_from_scores([], by_hand) == []


@BOUNDED
@given(scores=score_batch, quantiles=boundary_lists)
def test_a_better_score_never_has_a_lower_grade_and_equal_ones_have_the_same(
    scores: list[float], quantiles: tuple[float, ...]
) -> None:
    grades = grades_from_scores(scores, GradeSettings("quantiles", quantiles))
    for one, grade in zip(scores, grades, strict=True):
        for other, lower in zip(scores, grades, strict=True):
            assert grade >= lower if one >= other else grade <= lower
    assert max(grades) == len(quantiles), "the best of a list reaches every quantile"


def test_judgements_may_replace_the_teacher_or_lift_known_positives_to_the_top() -> None:
    keep, positives = GradeSettings(qrels="keep"), GradeSettings(qrels="positives")
    assert merged_grade(2, 1, GradeSettings()) == (2, "teacher")
    assert [merged_grade(2, judged, keep) for judged in (None, 0, 1, -2)] == [
        (2, "teacher"),
        (0, "qrels"),
        (1, "qrels"),
        (0, "qrels"),
    ]
    assert [merged_grade(2, judged, positives) for judged in (None, 0, 1)] == [
        (2, "teacher"),
        (2, "teacher"),
        (3, "qrels"),
    ]
    assert merged_grade(None, None, positives) == (None, None)


@pytest.mark.parametrize(
    ("by", "boundaries", "said"),
    [
        ("quantiles", (0.9, 0.5), "ascending"),
        ("quantiles", (), "at least one"),
        ("quantiles", (0.5, 1.0), "between 0 and 1"),
        ("thresholds", (math.nan,), "finite"),
    ],
)
def test_boundaries_that_make_no_sense_are_refused(by: str, boundaries: tuple[float, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        GradeSettings(by, boundaries)


@BOUNDED
@given(
    scores=st.lists(st.none() | st.floats(-9, 9, width=16), max_size=30),
    size=st.integers(2, 9),
    count=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_strata_take_one_scored_document_from_each_part_of_the_teachers_order(
    scores: list[float | None], size: int, count: int, seed: int
) -> None:
    lists = sample_strata(scores, count, (size, size), generator(seed))
    best_first = sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -(scores[i] or 0.0))
    assert len(lists) <= count and len({tuple(chosen) for chosen in lists}) == len(lists)
    for chosen in lists:
        assert list(chosen) == sorted(set(chosen.tolist()))
        if len(best_first) <= size:
            assert chosen.tolist() == sorted(best_first)
            continue
        places = sorted(best_first.index(i) for i in chosen)
        strata = [part.tolist() for part in np.array_split(np.arange(len(best_first)), size)]
        assert all(place in stratum for place, stratum in zip(places, strata, strict=True))


def test_eight_of_twenty_by_score_always_hold_a_top_and_a_bottom_passage() -> None:
    scores = [float(-i) for i in range(20)]
    for seed in range(20):
        (chosen,) = sample_strata(scores, 1, (8, 8), generator(seed))
        assert chosen[0] < 3 and chosen[-1] > 17 and len(chosen) == 8


def teacher_scores(folder: Path, name: str, scores: dict[str, dict[str, float]]) -> Path:
    run = {query: sorted(listed.items(), key=lambda row: -row[1]) for query, listed in scores.items()}
    write_run(folder / name, run, "toy-teacher")
    return folder / name


def documents_of(output: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "contexts.jsonl").read_text().splitlines()]
    return {document["doc_id"]: document for row in rows for document in row["documents"]}


def test_pairs_from_a_teachers_run_alone_need_no_judgements(tmp_path: Path) -> None:
    collection = make_collection(tmp_path / "web", {"q1": [None] * 5, "q2": [None] * 3})
    (tmp_path / "web" / "qrels.txt").unlink()
    # dq1-4 and q2 have no label
    scores = {"q1": {f"dq1-{i}": score for i, score in enumerate([0.5, 7.25, -3.0, -8.0])}}
    run = teacher_scores(tmp_path, "teacher.trec", scores)
    words = [
        "pairs",
        "--collection",
        str(collection.queries_path.parent),
        "--labels",
        str(run),
        "--label-thresholds",
        "-4",
        "0",
        "4",
    ]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    (context,) = iterate_contexts(tmp_path / "out" / "contexts.jsonl")
    assert [(d.grade, d.teacher_score, d.grade_from) for d in context.documents] == [
        (2, 0.5, "teacher"),
        (3, 7.25, "teacher"),
        (1, -3.0, "teacher"),
        (0, -8.0, "teacher"),
        (None, None, None),
    ]
    pairs = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("dq1-0", "dq1-2"),
        ("dq1-1", "dq1-0"),
        ("dq1-2", "dq1-3"),
    ]


def test_the_summary_names_the_run_its_bytes_the_grades_and_the_teacher(tmp_path: Path) -> None:
    make_collection(tmp_path / "web", {"q1": [1, 0, None, None]})
    run = teacher_scores(tmp_path, "web.toy.trec", {"q1": {"dq1-0": 1.0, "dq1-1": 2.0, "dq1-2": 3.0, "dq1-3": 0.0}})
    (tmp_path / "web.toy.trec.json").write_text(json.dumps({"format": "headrank-labels/1", "teacher": {"kind": "toy"}}))
    words = ["pairs", "--collection", str(tmp_path / "web"), "--labels", str(tmp_path), "--label-quantiles", "0.5"]
    assert main([*words, "--qrels-with-labels", "positives", "--output", str(tmp_path / "out")]) == 0
    (known,) = json.loads((tmp_path / "out" / "pairs.summary.json").read_text())["labels"]
    assert known["collection"] == "web" and known["run"] == run.name and len(known["sha256"]) == 64
    assert known["grades"] == {"by": "quantiles", "boundaries": [0.5], "qrels": "positives"}
    assert known["teacher"]["teacher"] == {"kind": "toy"}
    documents = documents_of(tmp_path / "out")
    # scores 3, 2, 1, 0: the upper half has grade 1; dq1-0 is judged relevant and rises to the top
    assert [documents[f"dq1-{i}"]["grade"] for i in range(4)] == [1, 1, 1, 0]
    assert [documents[f"dq1-{i}"]["grade_from"] for i in range(3)] == ["qrels", "teacher", "teacher"]


def test_without_labels_the_files_have_no_word_of_a_teacher(tmp_path: Path) -> None:
    make_collection(tmp_path / "web", {"q1": [1, 0]})
    assert main(["pairs", "--collection", str(tmp_path / "web"), "--output", str(tmp_path / "out")]) == 0
    assert set(documents_of(tmp_path / "out")["dq1-0"]) == {"doc_id", "title", "text", "rank", "grade"}
    assert "labels" not in json.loads((tmp_path / "out" / "pairs.summary.json").read_text())


@pytest.mark.parametrize("permutations", [0, 2])
def test_teacher_scores_reach_the_sample_in_the_order_of_its_documents(tmp_path: Path, permutations: int) -> None:
    make_collection(tmp_path / "web", {"q1": [None] * 6})
    scores = {f"dq1-{i}": 10.0 - 3 * i for i in range(5)}  # the sixth has none
    run = teacher_scores(tmp_path, "web.trec", {"q1": scores})
    assert (
        main(["pairs", "--collection", str(tmp_path / "web"), "--labels", str(run), "--output", str(tmp_path / "out")])
        == 0
    )
    encoder = PromptEncoder(tiny_tokenizer(), PromptTemplate())
    data = TrainingSet(tmp_path / "out", encoder, permutations=permutations)
    for number in range(len(data)):
        sample = data.at(number)
        assert sample.teacher is not None
        expected = [10.0 - 3 * (rank - 1) if rank < 6 else math.nan for rank in sample.retrieval_ranks.tolist()]
        np.testing.assert_array_equal(sample.teacher, np.array(expected, np.float32))


def test_a_set_without_a_teacher_has_samples_without_scores(tmp_path: Path) -> None:
    make_collection(tmp_path / "web", {"q1": [1, 0]})
    assert main(["pairs", "--collection", str(tmp_path / "web"), "--output", str(tmp_path / "out")]) == 0
    assert TrainingSet(tmp_path / "out", PromptEncoder(tiny_tokenizer(), PromptTemplate())).at(0).teacher is None


def test_lists_of_eight_by_score_have_adjacent_pairs_and_only_scored_documents(tmp_path: Path) -> None:
    make_collection(tmp_path / "web", {"q1": [None] * 20})
    run = teacher_scores(tmp_path, "web.trec", {"q1": {f"dq1-{i}": float((7 * i) % 17) for i in range(16)}})
    words = ["pairs", "--collection", str(tmp_path / "web"), "--labels", str(run), "--sublists-by", "score"]
    assert main([*words, "--sublists", "3", "--sublist-size", "8", "--output", str(tmp_path / "out")]) == 0
    contexts = list(iterate_contexts(tmp_path / "out" / "contexts.jsonl"))
    assert len(contexts) == 3
    for context in contexts:
        assert len(context.documents) == 8 and all(d.teacher_score is not None for d in context.documents)
        assert len(adjacent_pairs([d.grade for d in context.documents]))


def test_all_passages_of_a_list_are_cut_to_the_same_number_of_words_and_lists_to_different_ones(tmp_path: Path) -> None:
    make_collection(tmp_path / "web", {f"q{number}": [1, 0, 0] for number in range(12)})
    corpus = tmp_path / "web" / "corpus.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    corpus.write_text("".join(json.dumps(row | {"text": "one two three four five six"}) + "\n" for row in rows))
    words = ["pairs", "--collection", str(tmp_path / "web"), "--list-words", "2", "4", "300", "--output"]
    assert main([*words, str(tmp_path / "out")]) == main([*words, str(tmp_path / "again")]) == 0
    lengths = [
        {len(document.text.split()) for document in context.documents}
        for context in iterate_contexts(tmp_path / "out" / "contexts.jsonl")
    ]
    assert all(len(found) == 1 for found in lengths) and set.union(*lengths) == {2, 4, 6}
    assert (tmp_path / "out" / "contexts.jsonl").read_bytes() == (tmp_path / "again" / "contexts.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--label-thresholds", "0"], "--label-thresholds is about a teacher's scores; add --labels RUN"),
        (["--qrels-with-labels", "keep"], "--qrels-with-labels is about a teacher's scores; add --labels RUN"),
        (["--labels", "{folder}"], "no web.trec or web.*.trec"),
        (["--labels", "a.trec", "--labels", "b.trec"], "2 runs for 1 collections"),
        (["--sublists-by", "score"], "--sublists-by is about sub-lists; add --sublists N"),
    ],
)
def test_mistakes_with_labels_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    make_collection(tmp_path / "web", {"q1": [1, 0]})
    call = ["pairs", "--collection", str(tmp_path / "web"), "--output", str(tmp_path / "out")]
    assert main([*call, *(word.format(folder=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_broken_teacher_score_in_contexts_names_file_and_line(tmp_path: Path) -> None:
    document = {"doc_id": "d", "title": "", "text": "t", "rank": 1, "grade": 1, "teacher_score": "high"}
    row = {"context_id": "c", "query_id": "q", "query": "q", "documents": [document]}
    (tmp_path / "contexts.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=r"contexts\.jsonl:1: 'teacher_score' is 'high'"):
        list(iterate_contexts(tmp_path / "contexts.jsonl"))
