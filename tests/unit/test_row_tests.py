"""Paired tests of rows with several seeds: a row is one system, tested once over queries."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.evaluation.significance import bootstrap_interval, paired_randomisation
from headrank.experiments.cells import Cell, find_cells
from headrank.reports.row_tests import opponents, paired_test_grids, pool_seeds
from tests.result_cells import make_cell

MEASURE = "nDCG@10"


def cell(model: str, method: str, values: dict[str, float], seed: int | None = None) -> Cell:
    facts = {"model": model or None, "method": method, "benchmark": "dl19", "measures": {MEASURE: 0.5}, "seed": seed}
    return Cell(Path(f"{model}-{method}-{seed}"), facts | {"per_query": {MEASURE: values}})


def test_a_row_is_the_mean_of_its_seeds_on_the_queries_that_all_of_them_have() -> None:
    cells = [
        cell("m", "headrank", {"a": 0.2, "b": 0.4, "c": 0.9}, 1),
        cell("m", "headrank", {"a": 0.6, "b": 0.2}, 2),
        cell("first-stage", "bm25", {"a": 0.1, "b": 0.1}),
    ]
    pooled = pool_seeds(cells, MEASURE)
    assert list(pooled) == [("", "bm25"), ("m", "headrank")]
    assert pooled["m", "headrank"] == pytest.approx({"a": 0.4, "b": 0.3})


def test_rows_meet_the_first_stage_the_best_of_the_others_and_their_own_heads_untrained() -> None:
    cells = [
        cell("base", "icr", {"a": 0.9}),
        cell("base", "core", {"a": 0.5}),
        cell("base", "rankgpt", {"a": 1.0}),
        cell("base", "headrank+untrained", {"a": 0.4}),
        cell("trained", "headrank+trained", {"a": 1.0}, 1),
        cell("", "bm25", {"a": 0.3}),
    ]
    assert opponents(pool_seeds(cells, MEASURE)) == [("", "bm25"), ("base", "icr"), ("base", "headrank+untrained")]


def test_the_grid_says_difference_interval_and_p_of_the_pooled_row(tmp_path: Path) -> None:
    make_cell(tmp_path, "", "bm25", "dl19")
    make_cell(tmp_path, "base", "icr", "dl19")
    for seed in (1, 2):
        make_cell(tmp_path, "trained", "headrank", "dl19", seed=seed)
    cells = find_cells(tmp_path)
    (grid,) = paired_test_grids(cells)
    rows = pool_seeds(cells, MEASURE)
    ours, bm25 = rows["trained", "headrank"], rows["", "bm25"]
    differences = [ours[query] - bm25[query] for query in bm25]
    low, high = bootstrap_interval(differences)
    p_value = paired_randomisation(list(ours.values()), list(bm25.values()))
    shown = {row[0]: row for row in grid.rows}
    assert grid.headers[3:] == ("minus BM25", "minus base ICR")
    assert shown["BM25"][3] == "" and shown["BM25"][1] == "12"
    expected = f"{100 * sum(differences) / 12:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert shown["trained HeadRank"][3].startswith(expected)
    assert (f"p = {p_value:.2g}" if p_value >= 0.001 else "p < 0.001") in shown["trained HeadRank"][3]


def test_a_row_that_shares_no_query_leaves_its_cell_empty_and_one_without_values_is_named() -> None:
    cells = [
        cell("", "bm25", {"a": 0.1, "b": 0.2}),
        cell("m", "icr", {"x": 0.9}),
        cell("m", "core", {"a": 0.3, "b": 0.2}),
        cell("m", "qr", {}),
    ]
    (grid,) = paired_test_grids(cells)
    shown = {row[0]: row for row in grid.rows}
    assert grid.headers[3:] == ("minus BM25", "minus m CoRe"), "of one easy query ICR is not the best row"
    assert shown["m ICR"][3:] == ("", "") and shown["m CoRe"][3].startswith("+10.0 [0.0, 20.0]")
    assert "not tested: m QR" in grid.caption


def test_a_row_alone_is_tested_against_nobody(tmp_path: Path) -> None:
    make_cell(tmp_path, "base", "icr", "dl19")
    assert paired_test_grids(find_cells(tmp_path)) == []


def test_folds_are_tested_together_over_all_their_queries(tmp_path: Path) -> None:
    from headrank.reports.row_tests import pooled_test_grid

    for fold, queries in (("fold-a", 6), ("fold-b", 4)):
        for method in ("bm25", "headrank+full", "headrank+no-omega"):
            make_cell(tmp_path, "" if method == "bm25" else "m", method, fold, queries=queries)
    grid = pooled_test_grid(find_cells(tmp_path), "headrank+full")
    assert grid is not None and "fold-a, fold-b together" in grid.caption
    assert [line.texts[0].text for line in grid.lines] == ["BM25", "m HeadRank (full)", "m HeadRank (no-omega)"]
    assert {line.texts[1].text for line in grid.lines} == {"10"}
    assert grid.headers[-2:] == ("minus BM25", "minus m HeadRank (full)")
    with pytest.raises(InputError, match="no row 'headrank\\+none' among the results"):
        pooled_test_grid(find_cells(tmp_path), "headrank+none")
