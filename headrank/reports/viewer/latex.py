"""The view as the paper's case-study table: purple boxes behind words, ranks by every method, relevance marks."""

from __future__ import annotations

from headrank.reports.table_text import latex_escape
from headrank.reports.viewer.contents import SHADE_FROM, Passage, View


def to_latex(view: View, *, top: int = 5, max_words: int = 60) -> str:
    """A table* of the ``top`` passages, each cut after ``max_words`` words; the preamble it needs is in the first
    comment.
    """
    methods = view.methods
    caption = (
        f"Token-level attention of {latex_escape(view.method)} ({latex_escape(view.model)}). Query: "
        f"``{latex_escape(view.query)}'' "
        r"Deeper \hlc[violet!80!white]{purple} indicates higher attention weight."
    )
    if methods:
        caption += (
            f" The {latex_escape('/'.join(methods))} column{'s show' if len(methods) > 1 else ' shows'} the rank "
            "each method assigns."
        )
    heads = [
        r"\textbf{Rank}",
        r"\textbf{Passage (token-level attention coloring)}",
        *(rf"\textbf{{{latex_escape(name)}}}" for name in methods),
    ]
    lines = [
        r"% needs \usepackage{booktabs, xcolor, pifont} and",
        r"% \newcommand{\hlc}[2][yellow]{{\setlength{\fboxsep}{0.5pt}\colorbox{#1!70!white}{#2}}}",
        r"% text outside Latin scripts needs LuaLaTeX or XeLaTeX with a font that has it",
        r"\begin{table*}[t]",
        r"\centering",
        r"\scriptsize",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:attn_{''.join(char if char.isalnum() else '_' for char in view.query_id)}}}",
        r"\setlength{\tabcolsep}{2pt}",
        rf"\begin{{tabular}}{{c p{{0.68\textwidth}} {'c' * len(methods)} c}}",
        r"\toprule",
        " & ".join([*heads, r"\textbf{Rel.}"]) + r" \\",
        r"\midrule",
    ]
    rows = [_row(view, passage, max_words) for passage in view.passages[:top]]
    lines.append("\n\\addlinespace[3pt]\n".join(rows))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])


def _row(view: View, passage: Passage, max_words: int) -> str:
    ranks = ["--" if passage.ranks[name] is None else str(passage.ranks[name]) for name in view.methods]
    mark = r"\ding{51}" if passage.grade is not None and passage.grade >= view.relevant_from else "--"
    return " & ".join([rf"\#{passage.rank}", _text(passage, max_words), *ranks, mark]) + r" \\"


def _text(passage: Passage, max_words: int) -> str:
    """Words with their boxes; spaces stay where the text has them; the title is bold."""
    pieces: list[str] = []
    title: list[str] = []
    previous = 0
    for (begin, end), value in list(zip(passage.words, passage.shades(), strict=True))[:max_words]:
        word = latex_escape(passage.text[begin:end])
        shown = rf"\hlc[violet!{round(100 * value)}!white]{{{word}}}" if value >= SHADE_FROM else word
        space = " " if previous and passage.text[previous:begin] else ""
        (title if end <= passage.title_length else pieces).append(space + shown)
        previous = end
    bold = rf"\textbf{{{''.join(title).strip()}}} " if title else ""
    return bold + "".join(pieces).strip() + (r" \ldots" if len(passage.words) > max_words else "")
