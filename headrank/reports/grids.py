"""A table of texts: what every report hands to the one renderer in table_text.py, whatever it was computed from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Mark = Literal["", "best", "second"]


@dataclass(frozen=True)
class Text:
    """One entry of a row and its emphasis."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class GridRow:
    """One row; neighbours of the same ``group`` stand under one name, ``is_quoted`` rows are somebody else's
    numbers.
    """

    entries: tuple[Text | str, ...]
    group: str = ""
    is_quoted: bool = False

    @property
    def texts(self) -> tuple[Text, ...]:
        """The entries, those without emphasis too."""
        return tuple(Text(entry) if isinstance(entry, str) else entry for entry in self.entries)


@dataclass(frozen=True)
class Grid:
    """A table; the first entry of a row is its name.

    ``group_header`` is the head of the column of row groups (none when empty). LaTeX has room for two lines of heads:
    ``spans`` above ``short_headers``; everywhere else ``headers`` must tell the columns apart alone.
    """

    caption: str
    headers: tuple[str, ...]
    rows: tuple[GridRow | tuple[str, ...], ...]
    group_header: str = ""
    spans: tuple[str, ...] = ()
    short_headers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    name: str = "table"

    @property
    def lines(self) -> tuple[GridRow, ...]:
        """The rows, plain tuples too."""
        return tuple(row if isinstance(row, GridRow) else GridRow(row) for row in self.rows)

    def groups(self) -> list[tuple[str, list[GridRow]]]:
        """Consecutive rows of the same group."""
        # neighbours only: rows of one group that do not stand together are two groups
        return [(name, list(rows)) for name, rows in groupby(self.lines, key=lambda row: row.group)]
