"""The one table renderer: a Grid as Markdown, plain text, on a terminal, as LaTeX (booktabs), CSV and HTML.

The same grid always gives the same bytes.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from headrank.reports.grids import Grid, GridRow, Text

if TYPE_CHECKING:
    from rich.console import RenderableType

_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "–": "--",
    "—": "---",
    "’": "'",
    "‘": "`",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
    "✓": r"\ding{51}",
}


def to_markdown(grid: Grid) -> str:
    """A GitHub table under its caption: best bold, second underlined, quoted names in italics; notes below."""
    heads = [*([grid.group_header] if grid.group_header else []), *grid.headers]
    num_names = len(heads) - len(grid.headers) + 1
    lines = [_markdown_line(heads), "|" + "---|" * num_names + "---:|" * (len(heads) - num_names)]
    for group, rows in grid.groups():
        for place, row in enumerate(rows):
            name, *entries = row.texts
            first = [group if place == 0 else ""] if grid.group_header else []
            shown = [
                f"*{_markdown_escape(name.text)}*" if row.is_quoted else _marked_markdown(name),
                *map(_marked_markdown, entries),
            ]
            lines.append("| " + " | ".join([*map(_markdown_escape, first), *shown]) + " |")
    caption = f"**{grid.caption}**\n\n" if grid.caption else ""
    return caption + "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in grid.notes)


def to_text(grid: Grid, numbers: Collection[int] = ()) -> str:
    """Aligned columns for a terminal, those of ``numbers`` to the right; the caption is left to the caller."""
    rows = [list(grid.headers), *([entry.text for entry in row.texts] for row in grid.lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(grid.headers))]
    sides = [str.rjust if place in numbers else str.ljust for place in range(len(widths))]
    lines = [
        "  ".join(side(text, width) for side, text, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def to_terminal(grid: Grid) -> RenderableType:
    """A table with a frame for a screen: the caption above, the best bold, the notes below."""
    from rich.table import Table
    from rich.text import Text as ScreenText

    table = Table(title=grid.caption, caption="\n".join(grid.notes) or None)
    for place, header in enumerate(grid.headers):
        table.add_column(ScreenText(header), justify="right" if place else "left")
    for row in grid.lines:
        is_best = any(entry.mark == "best" for entry in row.texts)
        table.add_row(*(ScreenText(entry.text) for entry in row.texts), style="bold" if is_best else None)
    return table


def to_csv(grid: Grid) -> str:
    """Plain texts, a line per row; row groups come first."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*([grid.group_header] if grid.group_header else []), *grid.headers])
    for row in grid.lines:
        writer.writerow([*([row.group] if grid.group_header else []), *(entry.text for entry in row.texts)])
    return stream.getvalue()


def to_latex(grid: Grid) -> str:
    """A booktabs table* with multirow groups; \\textbf and \\underline mark best and second, quoted names are
    italic.
    """
    heads = [*([grid.group_header] if grid.group_header else []), *(grid.short_headers or grid.headers)]
    num_names = len(heads) - len(grid.headers) + 1
    lines = [
        "% needs \\usepackage{booktabs, multirow, graphicx, pifont}",
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{latex_escape(' '.join((grid.caption + '.', *grid.notes)))}}}",
        rf"\label{{tab:{grid.name}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{@{{}} {'l' * num_names} {'c' * (len(heads) - num_names)} @{{}}}}",
        r"\toprule",
        *_latex_spans(grid, num_names),
        " & ".join(rf"\textbf{{{latex_escape(head)}}}" for head in heads) + r" \\",
    ]
    for group, rows in grid.groups():
        lines.append(r"\midrule")
        lines += [_latex_row(grid, row, group if place == 0 else "", len(rows)) for place, row in enumerate(rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}%", "}", r"\end{table*}", ""])


def to_html(grid: Grid) -> str:
    """An accessible table: caption, scoped heads, <strong> for best, <u> for second; wide ones scroll by themselves."""
    label = html.escape(grid.caption)
    heads = [*([grid.group_header] if grid.group_header else []), *grid.headers]
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    parts = [f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>']
    parts.append(f"<thead><tr>{head}</tr></thead>")
    for group, rows in grid.groups():
        parts.append("<tbody>")
        for place, row in enumerate(rows):
            has_name = grid.group_header and place == 0
            name = f'<th scope="rowgroup" rowspan="{len(rows)}">{html.escape(group)}</th>' if has_name else ""
            parts.append(f"<tr{' class=paper' if row.is_quoted else ''}>{name}{_html_entries(row)}</tr>")
        parts.append("</tbody>")
    return (
        "".join(parts) + "</table></div>" + "".join(f'<p class="note">{html.escape(note)}</p>' for note in grid.notes)
    )


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it is; control characters become spaces."""
    return "".join(_LATEX_SPECIAL.get(char, char if char.isprintable() else " ") for char in text)


def _markdown_escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown_escape, texts)) + " |"


def _marked_markdown(entry: Text) -> str:
    text = _markdown_escape(entry.text)
    return f"**{text}**" if entry.mark == "best" else f"<u>{text}</u>" if entry.mark == "second" else text


def _latex_row(grid: Grid, row: GridRow, group: str, num_rows: int) -> str:
    name, *entries = row.texts
    cells = [rf"\textit{{{latex_escape(name.text)}}}" if row.is_quoted else latex_escape(name.text)]
    for entry in entries:
        text = latex_escape(entry.text)
        cells.append(
            rf"\textbf{{{text}}}"
            if entry.mark == "best"
            else rf"\underline{{{text}}}"
            if entry.mark == "second"
            else text
        )
    if grid.group_header:
        cells.insert(0, rf"\multirow{{{num_rows}}}{{*}}{{\textit{{{latex_escape(group)}}}}}" if group else "")
    return " & ".join(cells) + r" \\"


def _latex_spans(grid: Grid, num_names: int) -> list[str]:
    """The line above the heads with its rules, when any column has a name there."""
    if not any(grid.spans):
        return []
    cells, rules, column = [""] * num_names, [], num_names + 1
    for name, columns in groupby(grid.spans):
        width = len(list(columns))
        shown = rf"\textbf{{{latex_escape(name)}}}" if name else ""
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{shown}}}")
        if name:
            rules.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    return [" & ".join(cells) + r" \\", " ".join(rules)]


def _html_entries(row: GridRow) -> str:
    name, *entries = row.texts
    return f'<th scope="row">{html.escape(name.text)}</th>' + "".join(map(_html_entry, entries))


def _html_entry(entry: Text) -> str:
    """Words are set left, numbers right."""
    text = html.escape(entry.text)
    shown = f"<strong>{text}</strong>" if entry.mark == "best" else f"<u>{text}</u>" if entry.mark == "second" else text
    is_number = entry.text[:1] in "+-.0123456789" or not entry.text
    return f"<td>{shown}</td>" if is_number else f'<td class="words">{shown}</td>'
