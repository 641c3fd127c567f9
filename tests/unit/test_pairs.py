"""ALPS: which pairs are made, how they are capped and sampled, and that the files are the same bytes every time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.build_pairs import PairSettings, build_pairs
from data_tools.contexts import iterate_contexts, iterate_pairs
from data_tools.pairs import adjacent_pairs, cap_pairs, known_grades, random_pairs, sample_sublists
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Collection
from headrank.seeds import generator
from tests.toy_collections import make_collection

BOUNDED = settings(max_examples=50, deadline=None)
grade_lists = st.lists(st.none() | st.integers(0, 3), max_size=30)


def slow_adjacent_pairs(grades: list[int | None]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, high in enumerate(grades)
        for j, low in enumerate(grades)
        if high is not None and low is not None and high - low == 1
    ]


@BOUNDED
@given(grades=grade_lists)
def test_adjacent_pairs_equal_two_loops(grades: list[int | None]) -> None:
    assert [tuple(pair) for pair in adjacent_pairs(grades)] == slow_adjacent_pairs(grades)


def test_adjacent_pairs_skip_gaps_larger_than_one_and_unjudged_documents() -> None:
    assert adjacent_pairs([3, 0, None, 2, 1]).tolist() == [[0, 3], [3, 4], [4, 1]]
    assert adjacent_pairs([3, 1, None]).shape == (0, 2)
    assert adjacent_pairs([]).shape == (0, 2)


def test_unjudged_documents_count_as_zero_only_when_asked_and_negative_grades_always() -> None:
    assert known_grades([None, -2, 1]) == [None, 0, 1]
    assert known_grades([None, -2, 1], unjudged_as_zero=True) == [0, 0, 1]


@BOUNDED
@given(grades=grade_lists, limit=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_cap_keeps_exactly_its_number_of_pairs_and_takes_levels_evenly(
    grades: list[int | None], limit: int, seed: int
) -> None:
    pairs = adjacent_pairs(grades)
    kept = cap_pairs(pairs, grades, limit, generator(seed))
    assert len(kept) == min(limit, len(pairs))
    assert len({tuple(pair) for pair in kept}) == len(kept)
    assert {tuple(pair) for pair in kept} <= {tuple(pair) for pair in pairs}
    available = Counter(grades[chosen] for chosen, _ in pairs)
    taken = Counter(grades[chosen] for chosen, _ in kept)
    short = [level for level in available if taken[level] < available[level]]
    assert all(taken[level] >= max(taken.values()) - 1 for level in short)  # only an exhausted level may give less


@BOUNDED
@given(grades=grade_lists, seed=st.integers(0, 5))
def test_random_pairs_are_as_many_as_adjacent_ones_and_prefer_the_higher_grade(
    grades: list[int | None], seed: int
) -> None:
    pairs = random_pairs(grades, generator(seed))
    assert len(pairs) == len(adjacent_pairs(grades))
    assert all(grades[chosen] > grades[rejected] for chosen, rejected in pairs)


def test_random_pairs_reach_gaps_that_adjacent_pairs_discard() -> None:
    grades = [3, 2, 1, 0] * 5
    gaps = Counter(grades[a] - grades[b] for a, b in random_pairs(grades, generator(0)))
    assert gaps[2] > 0
    assert gaps[3] > 0


@BOUNDED
@given(
    grades=grade_lists, count=st.integers(1, 4), size=st.integers(2, 12), more=st.integers(0, 5), seed=st.integers(0, 5)
)
def test_every_sublist_has_an_adjacent_pair_and_keeps_the_retrievers_order(
    grades: list[int | None], count: int, size: int, more: int, seed: int
) -> None:
    sublists = sample_sublists(grades, count, (size, size + more), generator(seed))
    assert len(sublists) <= count
    assert bool(sublists) == bool(len(adjacent_pairs(grades)))
    for members in sublists:
        assert min(size, len(grades)) <= len(members) <= min(size + more, len(grades))
        assert (np.diff(members) > 0).all()
        assert len(adjacent_pairs([grades[i] for i in members]))
    assert len({tuple(members) for members in sublists}) == len(sublists)


def test_a_range_of_lengths_is_drawn_evenly() -> None:
    lengths = Counter(len(members) for members in sample_sublists([1, 0] * 20, 900, (8, 10), generator(0)))
    assert sorted(lengths) == [8, 9, 10]
    assert min(lengths.values()) > 240  # 300 each on average; a deviation is 14


GRADES = {"q1": [1, 0, None, 3, 2], "q2": [0, 0, 2], "q3": [None, None], "q4": [0, 1, 1]}


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return make_collection(tmp_path / "toy", GRADES)


def test_files_hold_contexts_in_retriever_order_and_their_pairs(collection: Collection, tmp_path: Path) -> None:
    counts = build_pairs([collection], tmp_path / "out", PairSettings())
    contexts = list(iterate_contexts(tmp_path / "out" / "contexts.jsonl"))
    assert [context.context_id for context in contexts] == ["toy/q1", "toy/q4"]
    assert [(d.doc_id, d.rank, d.grade) for d in contexts[0].documents] == [
        (f"dq1-{i}", i + 1, grade) for i, grade in enumerate(GRADES["q1"])
    ]
    assert contexts[0].query == "query q1"
    assert contexts[0].documents[2].text == "text of dq1-2"
    pairs = [(pair.context_id, pair.chosen, pair.rejected) for pair in iterate_pairs(tmp_path / "out" / "pairs.jsonl")]
    first = [("toy/q1", f"dq1-{a}", f"dq1-{b}") for a, b in [(0, 1), (3, 4), (4, 0)]]
    assert pairs == [*first, ("toy/q4", "dq4-1", "dq4-0"), ("toy/q4", "dq4-2", "dq4-0")]
    count = counts[0]
    assert (count.queries, count.unjudged_queries, count.queries_without_pairs, count.contexts) == (4, 1, 1, 2)
    assert count.steps == {(1, 0): 3, (2, 1): 1, (3, 2): 1}
    assert count.pairs_per_query == pytest.approx(5 / 3)
    assert json.loads((tmp_path / "out" / "pairs.summary.json").read_text())["collections"][0]["steps"] == {
        "1>0": 3,
        "2>1": 1,
        "3>2": 1,
    }


def test_the_same_input_and_seed_give_the_same_bytes_and_another_seed_does_not(
    collection: Collection, tmp_path: Path
) -> None:
    def built(name: str, **changes: int) -> list[bytes]:
        build_pairs(
            [collection], tmp_path / name, PairSettings(max_pairs=2, sublists=2, sublist_size=(3, 3), **changes)
        )
        return [(tmp_path / name / file).read_bytes() for file in ("contexts.jsonl", "pairs.jsonl")]

    assert built("a") == built("b")
    assert built("c", seed=1) != built("a")


def test_depth_cuts_the_list_before_pairs_are_made(collection: Collection, tmp_path: Path) -> None:
    counts = build_pairs([collection], tmp_path / "out", PairSettings(depth=2))
    assert counts[0].steps == {(1, 0): 2}
    assert all(len(context.documents) == 2 for context in iterate_contexts(tmp_path / "out" / "contexts.jsonl"))


def test_judged_only_leaves_the_others_out_and_changes_no_pair(collection: Collection, tmp_path: Path) -> None:
    build_pairs([collection], tmp_path / "all", PairSettings())
    build_pairs([collection], tmp_path / "judged", PairSettings(judged_only=True))
    first = next(iterate_contexts(tmp_path / "judged" / "contexts.jsonl"))
    assert [(document.doc_id, document.rank) for document in first.documents] == [
        ("dq1-0", 1),
        ("dq1-1", 2),
        ("dq1-3", 4),
        ("dq1-4", 5),
    ]
    assert (tmp_path / "judged" / "pairs.jsonl").read_bytes() == (tmp_path / "all" / "pairs.jsonl").read_bytes()
    with pytest.raises(InputError, match="give one"):
        PairSettings(judged_only=True, unjudged_as_zero=True)


def test_a_sublist_context_keeps_the_original_ranks(collection: Collection, tmp_path: Path) -> None:
    build_pairs([collection], tmp_path / "out", PairSettings(sublists=3, sublist_size=(3, 3), keep_full_list=True))
    contexts = list(iterate_contexts(tmp_path / "out" / "contexts.jsonl"))
    assert sum("sublist" not in context.context_id for context in contexts) == 2
    for context in contexts:
        ranks = [document.rank for document in context.documents]
        assert ranks == sorted(ranks)
        assert [f"d{context.query_id}-{rank - 1}" for rank in ranks] == [
            document.doc_id for document in context.documents
        ]
    assert {context.context_id for context in contexts} >= {"toy/q1/sublist-0", "toy/q1/sublist-1", "toy/q1/sublist-2"}


def test_held_out_queries_are_left_out_and_an_unknown_one_is_an_error(collection: Collection, tmp_path: Path) -> None:
    build_pairs([collection], tmp_path / "out", PairSettings(), hold_out={"q1"})
    assert [context.query_id for context in iterate_contexts(tmp_path / "out" / "contexts.jsonl")] == ["q4"]
    build_pairs([collection], tmp_path / "out", PairSettings(), only={"q1"})
    assert [context.query_id for context in iterate_contexts(tmp_path / "out" / "contexts.jsonl")] == ["q1"]
    with pytest.raises(InputError, match="'q9'"):
        build_pairs([collection], tmp_path / "never", PairSettings(), hold_out={"q9"})
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 1},
        {"sublists": -1},
        {"max_pairs": -1},
        {"sublists": 2, "sublist_size": (1, 3)},
        {"sublist_size": (9, 3)},
        {"sublists": 10**12},
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`"):
        PairSettings(**changes)


def test_a_failure_leaves_the_old_files_and_no_others(collection: Collection, tmp_path: Path) -> None:
    build_pairs([collection], tmp_path / "out", PairSettings())
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    broken = make_collection(tmp_path / "broken", {"z1": [0, 1]}, prefix="z")
    broken.corpus_path.write_text('{"docid": "zz1-0", "text": "the other one is missing"}\n')
    with pytest.raises(InputError, match="'zz1-1'"):
        build_pairs([collection, broken], tmp_path / "out", PairSettings())
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_query_without_text_and_two_collections_of_one_name_are_errors(
    collection: Collection, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="two collections are called 'toy'"):
        build_pairs([collection, collection], tmp_path / "out", PairSettings())
    collection.queries_path.write_text("q1\tonly this one\n")
    with pytest.raises(InputError, match="query 'q2' is not in"):
        build_pairs([collection], tmp_path / "out", PairSettings())


def test_no_pairs_at_all_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    collection = make_collection(tmp_path / "flat", {"q1": [1, None, 1]})
    with pytest.raises(InputError, match="`unjudged_as_zero`"):
        build_pairs([collection], tmp_path / "out", PairSettings())
    assert build_pairs([collection], tmp_path / "out", PairSettings(unjudged_as_zero=True))[0].pairs == 2


def test_the_command_prints_the_table_and_reports_errors_in_one_line(
    collection: Collection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_collection(tmp_path / "second", {"z1": [0, 1]}, prefix="z")
    folders = ["--collection", str(tmp_path / "toy"), "--collection", str(tmp_path / "second")]
    assert main(["pairs", *folders, "--output", str(tmp_path / "out")]) == 0
    table = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert table["queries"] == ["4", "1", "5"]
    assert table["pairs 1 > 0"] == ["3", "1", "4"]
    assert table["pairs"] == ["5", "1", "6"]
    assert table["pairs per judged query"] == ["1.7", "1.0", "1.5"]
    assert main(["pairs", *folders, "--run", "x", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for flags in (["--sublist-size", "5"], ["--keep-full-list"]):
        assert main(["pairs", *folders, *flags, "--output", str(tmp_path / "out")]) == 2
        assert f"{flags[0]} is about sub-lists; add --sublists N" in capsys.readouterr().err
    assert main(["pairs", "--collection", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]) == 2


def test_dl21_gives_479_pairs_a_query_on_average(shared_data: Path, tmp_path: Path) -> None:
    count = build_pairs([Collection.open(shared_data / "dl21")], tmp_path, PairSettings(depth=100))[0]
    assert (count.queries, round(count.pairs_per_query)) == (53, 479)
