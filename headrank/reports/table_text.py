"""Tables as Markdown, LaTeX (booktabs), CSV and HTML. The same table always gives the same bytes."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable

from headrank.reports.tables import DECIMALS, Column, Mark, Row, Table, group_rows

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
}


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it is; control characters become spaces."""
    return "".join(_LATEX_SPECIAL.get(char, char if char.isprintable() else " ") for char in text)


def _cells(table: Table, row_index: int, row: Row, marks: dict, decorate: Callable[[str, Mark], str]) -> list[str]:
    """The number cells of a row: values, averages, success rate; empty where nothing was measured."""
    cells = []
    for column in table.all_columns:
        value = row.values.get(column.key)
        cells.append("" if value is None else decorate(value.text, marks.get((row_index, column.key), "")))
    if table.has_success_rate:
        cells.append("" if row.success_rate is None else f"{row.success_rate:.1f}")
    return cells


def _headers(table: Table) -> list[str]:
    names = [f"{column.group} {column.label}".strip() if _needs_group(table, column) else column.label for column in table.all_columns]
    return ["Model", "Method", *names, *(["SR (%)"] if table.has_success_rate else [])]


def _needs_group(table: Table, column: Column) -> bool:
    """Whether the label alone would be ambiguous in a one-line header."""
    return sum(other.label == column.label for other in table.all_columns) > 1


def to_markdown(table: Table) -> str:
    """A GitHub table: best bold, second underlined, the paper's rows in italics and labelled."""

    def decorate(text: str, mark: Mark) -> str:
        return f"**{text}**" if mark == "best" else f"<u>{text}</u>" if mark == "second" else text

    marks, lines = table.marks(), []
    headers = [header.replace("|", "\\|") for header in _headers(table)]
    lines += ["| " + " | ".join(headers) + " |", "|---|---|" + "---:|" * (len(headers) - 2)]
    previous = None
    for index, row in enumerate(table.completed_rows()):
        label = row.label.replace("|", "\\|")
        model = "" if row.model == previous else row.model.replace("|", "\\|")
        previous = row.model
        cells = [model, f"*{label}*" if row.source == "paper" else label, *_cells(table, index, row, marks, decorate)]
        lines.append("| " + " | ".join(cells) + " |")
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"**{table.title}**\n\n" + "\n".join(lines) + "\n" + notes


def to_csv(table: Table) -> str:
    """One line a row with plain numbers, ``source`` saying ours or paper; deviations over seeds in columns of their own."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    has_deviation = any(value.deviation is not None for row in table.rows for value in row.values.values())
    names = [f"{column.benchmark} {column.measure}" for column in table.all_columns]
    header = ["source", "model", "method", *names]
    header += [f"{name} std" for name in names] if has_deviation else []
    writer.writerow([*header, *(["success_rate"] if table.has_success_rate else [])])
    for row in table.completed_rows():
        values = [row.values.get(column.key) for column in table.all_columns]
        source = f"{row.source} ({row.depth})" if row.depth else row.source
        line = [source, row.model, row.method, *("" if value is None else f"{value.number:.{DECIMALS}f}" for value in values)]
        if has_deviation:
            line += ["" if value is None or value.deviation is None else f"{value.deviation:.{DECIMALS}f}" for value in values]
        if table.has_success_rate:
            line.append("" if row.success_rate is None else f"{row.success_rate:.1f}")
        writer.writerow(line)
    return stream.getvalue()


def to_latex(table: Table) -> str:
    """A booktabs table* with multirow models; \\textbf and \\underline mark best and second, the paper's rows are italic."""

    def decorate(text: str, mark: Mark) -> str:
        shown = latex_escape(text)
        return rf"\textbf{{{shown}}}" if mark == "best" else rf"\underline{{{shown}}}" if mark == "second" else shown

    marks = table.marks()
    averages = len(table.average_columns) + table.has_success_rate
    spec = "@{} ll " + "c" * len(table.columns) + (" | " + "c" * averages if averages else "") + " @{}"
    head = [r"\textbf{Model}", r"\textbf{Method}", *(rf"\textbf{{{latex_escape(column.label)}}}" for column in table.all_columns)]
    head += [r"\textbf{SR (\%)}"] if table.has_success_rate else []
    lines = [
        "% needs \\usepackage{booktabs, multirow, graphicx}",
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{latex_escape(' '.join((table.title + '.', *table.notes)))}}}",
        rf"\label{{tab:{table.name}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
        *_latex_groups(table),
        " & ".join(head) + r" \\",
    ]
    index = 0
    for model, rows in group_rows(table.completed_rows()):
        lines.append(r"\midrule")
        for place, row in enumerate(rows):
            first = rf"\multirow{{{len(rows)}}}{{*}}{{\textit{{{latex_escape(model)}}}}}" if place == 0 else ""
            label = latex_escape(row.label)
            lines.append(
                " & ".join([first, rf"\textit{{{label}}}" if row.source == "paper" else label, *_cells(table, index, row, marks, decorate)])
                + r" \\"
            )
            index += 1
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}%", "}", r"\end{table*}", ""])


def _latex_groups(table: Table) -> list[str]:
    """The line above the header with its rules, when any column has a group."""
    columns = table.all_columns
    if not any(column.group for column in columns):
        return []
    cells, rules, start = ["", ""], [], 0
    while start < len(columns):
        end = start
        while end + 1 < len(columns) and columns[end + 1].group == columns[start].group:
            end += 1
        name = columns[start].group
        shown = rf"\textbf{{{latex_escape(name)}}}" if name else ""
        cells.append(rf"\multicolumn{{{end - start + 1}}}{{c}}{{{shown}}}")
        if name:
            rules.append(rf"\cmidrule(lr){{{start + 3}-{end + 3}}}")
        start = end + 1
    return [" & ".join(cells + [""] * table.has_success_rate) + r" \\", " ".join(rules)]


def to_html(table: Table) -> str:
    """An accessible HTML table: caption, scoped headers, <strong> for best, <u> for second."""

    def decorate(text: str, mark: Mark) -> str:
        return f"<strong>{text}</strong>" if mark == "best" else f"<u>{text}</u>" if mark == "second" else text

    marks, parts, index = table.marks(), [], 0
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in _headers(table))
    parts.append(f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(table.title)}">')
    parts.append(f"<table><caption>{html.escape(table.title)}</caption><thead><tr>{heads}</tr></thead>")
    for model, rows in group_rows(table.completed_rows()):
        parts.append("<tbody>")
        for place, row in enumerate(rows):
            name = f'<th scope="rowgroup" rowspan="{len(rows)}">{html.escape(model)}</th>' if place == 0 else ""
            numbers = "".join(f"<td>{cell}</td>" for cell in _cells(table, index, row, marks, decorate))
            parts.append(f'<tr class="{row.source}">{name}<th scope="row">{html.escape(row.label)}</th>{numbers}</tr>')
            index += 1
        parts.append("</tbody>")
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return "".join(parts) + f"</table></div>{notes}"
