"""A run and its first stage together: by hand, against slow loops, by properties, and through the command."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Candidate, read_run, write_run
from headrank.reranking.fusion import fuse_list, fuse_runs, standardised

NUMBERS = st.lists(st.integers(-1000, 1000), min_size=2, max_size=12)


def candidates(scores: list[float]) -> list[Candidate]:
    return [Candidate(f"d{place}", place, float(score)) for place, score in enumerate(scores, start=1)]


def test_a_list_of_three_by_hand() -> None:
    first = candidates([3.0, 2.0, 1.0])  # standardised: 1.2247, 0, -1.2247
    # d1 d2 d3: -0.7071, -0.7071, 1.4142
    reranked = [Candidate("d3", 1, 8.0), Candidate("d2", 2, 5.0), Candidate("d1", 3, 5.0)]
    fused = fuse_list(first, reranked, depth=3, weight=0.5)
    assert [doc_id for doc_id, _ in fused] == ["d1", "d3", "d2"]
    assert [score for _, score in fused] == pytest.approx([0.2588, 0.0947, -0.3536], abs=1e-4)


@given(NUMBERS)
def test_standardising_is_what_loops_make_of_it(scores: list[int]) -> None:
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
    expected = [(score - mean) / deviation if deviation else 0.0 for score in scores]
    assert standardised(scores) == pytest.approx(expected, abs=1e-9)


@given(NUMBERS, st.floats(0, 1), st.floats(0.01, 100), st.floats(-100, 100), st.randoms())
def test_other_units_of_a_score_change_nothing(
    scores: list[int], weight: float, factor: float, shift: float, random
) -> None:
    first = candidates(sorted(scores, reverse=True))
    mine = [Candidate(candidate.doc_id, 1, float(random.randint(-50, 50))) for candidate in first]
    scaled = [Candidate(candidate.doc_id, 1, factor * candidate.score + shift) for candidate in mine]
    one, other = (dict(fuse_list(first, listed, len(first), weight)) for listed in (mine, scaled))
    assert [one[candidate.doc_id] for candidate in first] == pytest.approx(
        [other[candidate.doc_id] for candidate in first], abs=1e-6
    )


def test_the_ends_of_the_weight_are_the_two_orders_and_what_lies_below_stays() -> None:
    first = candidates([9.0, 5.0, 4.0, 3.0, 2.0])
    reranked = [
        Candidate(doc_id, 1, score)
        for doc_id, score in (("d2", 0.9), ("d3", 0.5), ("d1", 0.1), ("d4", -1.0), ("d5", -2.0))
    ]
    assert [doc_id for doc_id, _ in fuse_list(first, reranked, 3, 0.0)] == ["d1", "d2", "d3", "d4", "d5"]
    assert [doc_id for doc_id, _ in fuse_list(first, reranked, 3, 1.0)] == ["d2", "d3", "d1", "d4", "d5"]
    scores = [score for _, score in fuse_list(first, reranked, 3, 0.5)]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 5


def test_equal_scores_leave_the_decision_to_the_other_side() -> None:
    first = candidates([1.0, 1.0, 1.0])
    reranked = [Candidate("d3", 1, 0.3), Candidate("d1", 2, 0.2), Candidate("d2", 3, 0.1)]
    assert [doc_id for doc_id, _ in fuse_list(first, reranked, 3, 0.5)] == ["d3", "d1", "d2"]
    assert [doc_id for doc_id, _ in fuse_list(first, [Candidate(c.doc_id, 1, 7.0) for c in first], 3, 0.5)] == [
        "d1",
        "d2",
        "d3",
    ]
    assert not np.isnan(standardised([0.1] * 5)).any()


def test_what_does_not_belong_together_is_named() -> None:
    run = {"q1": candidates([2.0, 1.0])}
    with pytest.raises(InputError, match="query 'q1': candidate 'd2' of the first stage's top 2 was not reranked"):
        fuse_runs(run, {"q1": [Candidate("d1", 1, 1.0)]}, 2, 0.5)
    with pytest.raises(InputError, match="query 'q9' has no candidates in the first stage"):
        fuse_runs(run, {"q9": candidates([1.0])}, 2, 0.5)
    with pytest.raises(InputError, match="query 'q1': document 'd3' is not in the first stage"):
        fuse_runs(run, {"q1": candidates([3.0, 2.0, 1.0])}, 2, 0.5)


def test_another_depth_than_that_of_the_reranking_is_refused() -> None:
    first = {"q1": candidates([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])}
    scores = {
        "d1": 0.1,
        "d2": 0.4,
        "d3": 0.3,
        "d4": 0.2,
        "d5": 0.1 - 1,
        "d6": 0.1 - 2,
    }  # reranked to depth 4, as 'headrank rerank' writes it
    reranked = {
        "q1": [Candidate(doc_id, 1, score) for doc_id, score in sorted(scores.items(), key=lambda row: -row[1])]
    }
    assert [doc_id for doc_id, _ in fuse_runs(first, reranked, 4, 1.0)["q1"]] == ["d2", "d3", "d4", "d1", "d5", "d6"]
    with pytest.raises(
        InputError, match="candidate 'd4' was reranked and is not in the first stage's top 3; give the `depth`"
    ):
        fuse_runs(first, reranked, 3, 0.5)
    for depth in (5, 6):
        with pytest.raises(InputError, match=f"the reranking was not as deep as {depth}"):
            fuse_runs(first, reranked, depth, 0.5)


def test_scores_that_are_ranks_have_no_depth_to_find() -> None:
    first = {"q1": candidates([9.0, 5.0, 4.0])}
    assert len(fuse_runs(first, {"q1": candidates([3.0, 2.0, 1.0])}, 3, 0.5)["q1"]) == 3


def test_the_command_writes_a_run_of_the_reranked_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, mine, output = (str(tmp_path / name) for name in ("first.txt", "mine.txt", "out.txt"))
    write_run(first, {"q1": [("a", 3.0), ("b", 2.0)], "q2": [("c", 1.0)]}, "bm25")
    write_run(mine, {"q1": [("b", 0.5), ("a", 0.1)]}, "headrank")
    assert main(["fuse", mine, "--first-stage", first, "--depth", "2", "--weight", "0.75", "--output", output]) == 0
    assert {query_id: [row.doc_id for row in rows] for query_id, rows in read_run(output).items()} == {"q1": ["b", "a"]}
    assert "1 queries, 0.75 x" in capsys.readouterr().err
    for flags, words in (
        (["--weight", "1.5"], "--weight 1.5 must be from 0 to 1"),
        (["--tag", "two words"], "must be one word"),
    ):
        assert (
            main(["fuse", mine, "--first-stage", first, "--depth", "2", *flags, "--output", str(tmp_path / "no.txt")])
            == 2
        )
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no.txt").exists()


def test_the_command_keeps_what_it_reads_and_needs_only_the_collections_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, mine = str(tmp_path / "run.bm25.txt"), str(tmp_path / "mine.txt")
    write_run(first, {"q1": [("a", 3.0), ("b", 2.0)]}, "bm25")
    write_run(mine, {"q1": [("b", 0.5), ("a", 0.1)]}, "headrank")
    before = Path(first).read_text(), Path(mine).read_text()
    for output in (first, mine):
        assert main(["fuse", mine, "--collection", str(tmp_path), "--depth", "2", "--output", output]) == 2
        assert f"{output}: is read by this very command" in capsys.readouterr().err
    assert (
        main(["fuse", mine, "--collection", str(tmp_path), "--depth", "1", "--output", str(tmp_path / "out.txt")]) == 2
    )
    assert f"{mine} and {first}: query 'q1'" in capsys.readouterr().err
    assert (
        main(["fuse", mine, "--collection", str(tmp_path), "--depth", "2", "--output", str(tmp_path / "out.jsonl")])
        == 2
    )
    assert "writes TREC runs only" in capsys.readouterr().err
    assert before == (Path(first).read_text(), Path(mine).read_text()) and not list(tmp_path.glob("out*"))
    assert (
        main(["fuse", mine, "--collection", str(tmp_path), "--depth", "2", "--output", str(tmp_path / "out.txt")]) == 0
    )
