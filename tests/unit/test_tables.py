"""Tables: empty cells stay empty, averages need every column, marks follow the printed numbers, the paper's rows are
labelled.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrank.errors import InputError
from headrank.experiments.cells import Cell
from headrank.reports import table_text
from headrank.reports.paper_tables import Published, TableSpec, build_table, overview_table, parameters_in_name
from headrank.reports.table_text import latex_escape
from headrank.reports.tables import Column, Table, Value


def to_markdown(table: Table) -> str:
    return table_text.to_markdown(table.grid())


def to_latex(table: Table) -> str:
    return table_text.to_latex(table.grid())


def to_html(table: Table) -> str:
    return table_text.to_html(table.grid())


def to_csv(table: Table) -> str:
    return table_text.to_csv(table.data_grid())


COLUMNS = (Column("dl19", "nDCG@10", "DL19", "In-Domain"), Column("nq", "nDCG@10", "NQ", "Out-of-Domain"))


def cell(method: str, benchmark: str = "dl19", value: float = 0.5, model: str = "Qwen3-0.6B", **more: Any) -> Cell:
    metrics = {"model": model, "method": method, "benchmark": benchmark, "measures": {"nDCG@10": value}, **more}
    return Cell(Path(model) / method / benchmark, metrics)


CELLS = [
    cell("bm25", value=0.5058, model=""),
    cell("icr", value=0.5, success_rate=1.0),
    cell("icr", "nq", 0.3, success_rate=1.0),
    cell("headrank", value=0.6, success_rate=1.0),
]
SPEC = TableSpec(
    "ndcg10",
    "NDCG@10, top 40",
    COLUMNS,
    (
        Published("", "bm25", "dl19", "nDCG@10", 50.58),
        Published("Qwen3-0.6B", "icr", "dl19", "nDCG@10", 50.09),
        Published("Qwen3-0.6B", "icr", "nq", "nDCG@10", 33.62),
        Published("Qwen3-0.6B", "headrank", "dl19", "nDCG@10", 59.93),
        Published("Qwen3-0.6B", "headrank", "nq", "nDCG@10", 43.25),
    ),
    {("Qwen3-0.6B", "icr"): 100.0},
)


@pytest.fixture
def table() -> Table:
    return build_table(SPEC, CELLS)


def rows_of(table: Table) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in to_markdown(table).splitlines()
        if line.startswith("| ")
    ]


def test_ours_stand_beside_the_papers_and_the_papers_say_so(table: Table) -> None:
    labels = [row[:2] for row in rows_of(table)[1:]]
    assert labels == [
        ["First stage", "BM25"],
        ["", "*BM25 (paper)*"],
        ["Qwen3-0.6B", "ICR"],
        ["", "*ICR (paper)*"],
        ["", "HeadRank"],
        ["", "*HeadRank (paper)*"],
    ]


def test_cells_not_run_are_empty_and_their_row_has_no_average(table: Table) -> None:
    header, *rows = rows_of(table)
    ours = {row[1]: dict(zip(header, row, strict=True)) for row in rows}
    assert ours["HeadRank"]["NQ"] == ""
    assert ours["HeadRank"]["Avg."] == ""
    assert ours["ICR"]["Avg."] == "40.00"
    assert ours["*ICR (paper)*"]["Avg."] == "<u>41.86</u>"


def test_best_is_bold_second_underlined_and_first_stage_never_competes(table: Table) -> None:
    header, *rows = rows_of(table)
    dl19 = [row[header.index("DL19")] for row in rows]
    assert dl19 == ["50.58", "50.58", "<u>50.00</u>", "<u>50.09</u>", "**60.00**", "**59.93**"]


def test_a_lone_number_is_not_the_best_of_anything(table: Table) -> None:
    header, *rows = rows_of(table)
    assert [row[header.index("NQ")] for row in rows if row[1] == "ICR"] == ["30.00"]


def test_numbers_that_print_alike_share_the_mark() -> None:
    spec = TableSpec("t", "t", COLUMNS[:1])
    table = build_table(spec, [cell("icr", value=0.40001), cell("core", value=0.40002), cell("qr", value=0.3)])
    assert sorted(table.marks().values()) == ["best", "best", "second"]


def test_several_seeds_become_mean_and_deviation() -> None:
    table = build_table(
        TableSpec("t", "t", COLUMNS),
        [cell("headrank", value=value, seed=seed) for seed, value in enumerate((0.5, 0.52, 0.54))],
    )
    assert "52.00±2.00" in to_markdown(table)
    assert "± is the standard deviation over seeds." in to_markdown(table)
    assert r"52.00$\pm$2.00" in to_latex(table)
    assert "dl19 nDCG@10 std" in to_csv(table)


@pytest.mark.parametrize("seeds", [(None, None), (1, 1), (None, 1), (1, 2, 1)])
def test_cells_that_are_no_different_seeds_are_not_averaged(seeds: tuple[int | None, ...]) -> None:
    cells = [replace(cell("headrank", seed=seed), path=Path(f"run-{place}")) for place, seed in enumerate(seeds)]
    with pytest.raises(InputError) as caught:
        build_table(TableSpec("t", "t", COLUMNS), cells)
    assert str(caught.value) == (
        f"run-0 and run-{len(seeds) - 1}: both are Qwen3-0.6B HeadRank on dl19, and not of two seeds; "
        "label one METHOD+VARIANT or move one away"
    )
    with pytest.raises(InputError, match="run-0 and run-"):
        overview_table(cells, "ours")


def test_one_row_may_have_its_measures_in_two_cells() -> None:
    recall = Cell(
        Path("other"), {"model": "Qwen3-0.6B", "method": "icr", "benchmark": "dl19", "measures": {"R@5": 0.4}}
    )
    table = overview_table([cell("icr"), recall], "ours", measures=["nDCG@10", "R@5"])
    assert [value.text for value in table.rows[0].values.values()] == ["50.00", "40.00"]


@pytest.mark.parametrize(
    ("depths", "depth", "mark"),
    [
        ((40,), 40, "(paper)"),
        ((40,), 20, "(paper, top 40)"),
        ((40, 20), 20, "(paper, top 40 and 20)"),
        ((20,), 0, "(paper, top 20)"),
    ],
)
def test_the_papers_rows_name_their_depth_where_it_is_not_the_tables(
    depths: tuple[int, ...], depth: int, mark: str
) -> None:
    cells = [replace(one, metrics={**one.metrics, "depth": depth}) for one in CELLS]
    table = build_table(replace(SPEC, depths=depths), cells)
    assert [row[1] for row in rows_of(table)[1:]] == [
        "BM25",
        f"*BM25 {mark}*",
        "ICR",
        f"*ICR {mark}*",
        "HeadRank",
        f"*HeadRank {mark}*",
    ]
    assert rf"\textit{{ICR {mark}}}" in to_latex(table)
    assert f"ICR {mark}</th>" in to_html(table)


def test_success_rates_are_percentages_and_empty_where_there_is_no_format(table: Table) -> None:
    header, *rows = rows_of(table)
    assert [row[header.index("SR (%)")] for row in rows] == ["", "", "100.0", "100.0", "100.0", ""]


def test_csv_is_plain_numbers_with_their_source(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert rows[2] == {
        "source": "ours",
        "model": "Qwen3-0.6B",
        "method": "ICR",
        "dl19 nDCG@10": "50.00",
        "nq nDCG@10": "30.00",
        "average nDCG@10": "40.00",
        "success_rate": "100.0",
    }
    assert rows[3]["source"] == "paper"
    assert rows[4]["nq nDCG@10"] == ""


def test_latex_balances_braces_and_environments_and_keeps_columns_equal(table: Table) -> None:
    text = to_latex(table)
    assert text.count("{") == text.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{")
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    counts = {line.count("&") for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line}
    assert counts == {len(COLUMNS) + 3}
    assert r"\textbf{60.00}" in text
    assert r"\underline{50.00}" in text


def test_outside_names_are_escaped_everywhere() -> None:
    table = build_table(TableSpec("t", "50% & <more>", COLUMNS), [cell("a_b|<c>", model="m&n")])
    assert r"a\_b|\textless{}c\textgreater{}" in to_latex(table)
    assert r"m\&n" in to_latex(table)
    assert "a_b&lt;" not in to_html(table)
    assert "a_b|&lt;c&gt;" in to_html(table)
    assert "<c>" not in to_html(table)
    assert "a_b\\|&lt;c>" in to_markdown(table)


def test_latex_escapes_every_special_character() -> None:
    assert latex_escape("#$%&_{}~^\\") == r"\#\$\%\&\_\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}"


def test_two_measures_have_two_averages() -> None:
    columns = tuple(
        Column(name, measure, measure, name) for name in ("hotpotqa", "2wiki") for measure in ("R@2", "R@5")
    )
    cells = [
        Cell(Path(name), {"model": "m", "method": "icr", "benchmark": name, "measures": {"R@2": 0.4, "R@5": 0.6}})
        for name in ("hotpotqa", "2wiki")
    ]
    header, row = rows_of(build_table(TableSpec("recall", "Recall", columns), cells))
    assert header[2:] == ["hotpotqa R@2", "hotpotqa R@5", "2wiki R@2", "2wiki R@5", "Avg. R@2", "Avg. R@5", "SR (%)"]
    assert row[2:] == ["40.00", "60.00", "40.00", "60.00", "40.00", "60.00", ""]


def test_the_same_cells_give_the_same_bytes_in_any_order() -> None:
    first, second = build_table(SPEC, CELLS), build_table(SPEC, CELLS[::-1])
    for render in (to_markdown, to_latex, to_csv, to_html):
        assert render(first) == render(second)


def test_overview_takes_the_leading_measure_of_each_benchmark() -> None:
    hotpot = Cell(
        Path("x"), {"model": "m", "method": "icr", "benchmark": "hotpotqa100", "measures": {"R@2": 0.4, "R@5": 0.6}}
    )
    table = overview_table([cell("icr", model="m"), hotpot], "ours")
    assert [column.key for column in table.columns] == [("dl19", "nDCG@10"), ("hotpotqa100", "R@2")]


def test_values_over_one_seed_have_no_deviation() -> None:
    assert Value.over_seeds([50.0]).text == "50.00"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen3-0.6B", 6e8), ("SmolLM2-135M-Instruct", 135e6), ("qwen3_4B", 4e9), ("tiny", None), ("Llama-3.1 8B", 8e9)],
)
def test_model_sizes_are_read_from_names(name: str, parameters: float | None) -> None:
    assert parameters_in_name(name) == parameters
