"""The paper's table as an object: rows of methods under models, columns of benchmarks, our numbers and the paper's
apart.

A value that was not measured is None and stays an empty cell; nothing is ever filled in. Averages exist only for rows
that have every column. Values are what people read: percentages. ``grid`` and ``data_grid`` hand it to the renderer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Literal

from headrank.reports.grids import Grid, GridRow, Mark, Text

Source = Literal["ours", "paper"]
DECIMALS = 2


@dataclass(frozen=True)
class Column:
    """One benchmark under one measure; ``group`` is the line above the header (In-Domain, HotpotQA, ...)."""

    benchmark: str
    measure: str
    label: str
    group: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What a row's values are looked up by."""
        return self.benchmark, self.measure


@dataclass(frozen=True)
class Value:
    """A percentage; ``deviation`` is the standard deviation over seeds where there were several."""

    number: float
    deviation: float | None = None

    @classmethod
    def over_seeds(cls, numbers: Sequence[float]) -> Value:
        """Mean and, for two seeds or more, the sample standard deviation."""
        return cls(mean(numbers), stdev(numbers) if len(numbers) > 1 else None)

    @property
    def text(self) -> str:
        """51.10, or 51.10±0.42 over seeds."""
        shown = f"{self.number:.{DECIMALS}f}"
        return shown if self.deviation is None else f"{shown}±{self.deviation:.{DECIMALS}f}"


@dataclass(frozen=True)
class Row:
    """One method of one model. ``competes`` is False for first-stage rows, which are context and never marked best."""

    model: str
    method: str
    values: Mapping[tuple[str, str], Value]
    source: Source = "ours"
    success_rate: float | None = None  # percent
    competes: bool = True
    depth: str = ""  # 'top 40', where it is not the table's

    @property
    def label(self) -> str:
        """The method's cell: the paper's numbers always say whose they are, and their depth where it is another."""
        return (
            self.method
            if self.source == "ours"
            else f"{self.method} ({', '.join(filter(None, ('paper', self.depth)))})"
        )


@dataclass(frozen=True)
class Table:
    """Rows in print order; rows of one model stand together, and marks are given per model and source."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    has_average: bool = True
    has_success_rate: bool = True
    average_columns: tuple[Column, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        measures = list(dict.fromkeys(column.measure for column in self.columns))
        averages = tuple(
            Column(
                "average",
                measure,
                "Avg." if len(measures) == 1 else short_measure(measure),
                "" if len(measures) == 1 else "Avg.",
            )
            for measure in measures
        )
        object.__setattr__(self, "average_columns", averages if self.has_average and len(self.columns) > 1 else ())

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """Benchmarks, then averages."""
        return self.columns + self.average_columns

    def completed_rows(self) -> list[Row]:
        """The rows with their averages added where every column of the measure is there."""
        return [replace(row, values={**row.values, **self._averages(row)}) for row in self.rows]

    def _averages(self, row: Row) -> dict[tuple[str, str], Value]:
        averages = {}
        for column in self.average_columns:
            if column.key in row.values:  # the paper prints its own averages
                continue
            found = [row.values.get(each.key) for each in self.columns if each.measure == column.measure]
            # no average over what happens to be there: a row without its worst benchmark would lead the table
            if all(value is not None for value in found):
                averages[column.key] = Value(mean(value.number for value in found if value is not None))
        return averages

    def marks(self) -> dict[tuple[int, tuple[str, str]], Mark]:
        """(row index, column key) -> best or second among the competing rows of the same model and source.

        Compared as printed, so equal-looking numbers share a mark. A column with one number in it has no best.
        """
        rows = self.completed_rows()
        marked: dict[tuple[int, tuple[str, str]], Mark] = {}
        blocks: dict[tuple[str, Source], list[int]] = {}
        for index, row in enumerate(rows):
            if row.competes:
                blocks.setdefault((row.model, row.source), []).append(index)
        for indices in blocks.values():
            for column in self.all_columns:
                numbers = {
                    index: round(rows[index].values[column.key].number, DECIMALS)
                    for index in indices
                    if column.key in rows[index].values
                }
                ranked = sorted(set(numbers.values()), reverse=True)
                if len(numbers) < 2:
                    continue
                for index, number in numbers.items():
                    if number == ranked[0]:
                        marked[index, column.key] = "best"
                    elif number == ranked[1]:
                        marked[index, column.key] = "second"
        return marked

    def grid(self) -> Grid:
        """For people: models as row groups, best and second marked, the paper's rows quoted; empty where nothing was
        measured.
        """
        marks, rows = self.marks(), []
        for index, row in enumerate(self.completed_rows()):
            entries: list[Text | str] = [row.label]
            for column in self.all_columns:
                value = row.values.get(column.key)
                entries.append("" if value is None else Text(value.text, marks.get((index, column.key), "")))
            if self.has_success_rate:
                entries.append("" if row.success_rate is None else f"{row.success_rate:.1f}")
            rows.append(GridRow(tuple(entries), row.model, is_quoted=row.source == "paper"))
        success = ("SR (%)",) if self.has_success_rate else ()
        return Grid(
            self.title,
            ("Method", *map(self._header, self.all_columns), *success),
            tuple(rows),
            group_header="Model",
            spans=(*(column.group for column in self.all_columns), *("" for _ in success)),
            short_headers=("Method", *(column.label for column in self.all_columns), *success),
            notes=self.notes,
            name=self.name,
        )

    def data_grid(self) -> Grid:
        """For programs: plain numbers, ``source`` saying ours or paper; deviations over seeds in columns of their
        own.
        """
        has_deviation = any(value.deviation is not None for row in self.rows for value in row.values.values())
        names = [f"{column.benchmark} {column.measure}" for column in self.all_columns]
        headers = ["source", "model", "method", *names, *([f"{name} std" for name in names] if has_deviation else [])]
        rows = []
        for row in self.completed_rows():
            values = [row.values.get(column.key) for column in self.all_columns]
            line = [f"{row.source} ({row.depth})" if row.depth else row.source, row.model, row.method]
            line += ["" if value is None else f"{value.number:.{DECIMALS}f}" for value in values]
            if has_deviation:
                line += [
                    "" if value is None or value.deviation is None else f"{value.deviation:.{DECIMALS}f}"
                    for value in values
                ]
            if self.has_success_rate:
                line.append("" if row.success_rate is None else f"{row.success_rate:.1f}")
            rows.append(tuple(line))
        return Grid(
            self.title, (*headers, *(["success_rate"] if self.has_success_rate else [])), tuple(rows), name=self.name
        )

    def _header(self, column: Column) -> str:
        """The column's label, with its group where the label alone would be ambiguous in one line."""
        is_ambiguous = sum(other.label == column.label for other in self.all_columns) > 1
        return f"{column.group} {column.label}".strip() if is_ambiguous else column.label


def short_measure(measure: str) -> str:
    """The header form of a measure: nDCG@10 -> NDCG@10 as the paper writes it; others as they are."""
    return measure.replace("nDCG", "NDCG")
