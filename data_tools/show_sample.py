"""One training context as a person would read it: the prompt from its real tokens, spans coloured by grade, and its
pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, Context, iterate_contexts, iterate_pairs, pair_indices
from headrank.errors import InputError
from headrank.method.ordering import retriever_order
from headrank.method.spans import EncodedContext, PromptEncoder

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_GRADE_STYLES = ("red", "yellow", "green", "bold green")  # 0, 1, 2, 3 and above
_FRAME_STYLE, _QUERY_STYLE = "bright_black", "bold magenta"


def render_context(directory: Path, number: int, encoder: PromptEncoder, words: int = 40) -> Iterator[RenderableType]:
    """Yield the parts (for rich) of the ``number``-th context, from 0, of a folder made by ``headrank pairs``.

    Documents stand in the template's order; ``words`` cuts what is shown of each, never what is tokenised.
    """
    context = _find(directory, number)
    order = retriever_order(encoder.template, len(context.documents))
    encoded = encoder.encode(context.query, [(context.documents[i].title, context.documents[i].text) for i in order])
    places = {
        context.documents[index].doc_id: (place, context.documents[index].grade) for place, index in enumerate(order)
    }
    pairs = [
        pair_indices(directory, pair, places)
        for pair in iterate_pairs(directory / PAIRS_FILE)
        if pair.context_id == context.context_id
    ]
    yield _legend(context, encoded, len(pairs))
    yield _prompt(context, order, encoded, encoder.tokenizer, words)
    yield _table(context, order, encoded, np.array(pairs, np.int64).reshape(-1, 2))


def _find(directory: Path, number: int) -> Context:
    path = directory / CONTEXTS_FILE
    context = next(itertools.islice(iterate_contexts(path), number, None), None) if number >= 0 else None
    if context is None:
        count = sum(1 for _ in iterate_contexts(path))
        if not count:
            raise InputError(f"{path}: no contexts; the file is empty, make it with 'headrank pairs'")
        raise InputError(f"{path}: there is no context {number}; give a number from 0 to {count - 1}")
    return context


def _style(grade: int | None) -> str:
    return "white" if grade is None else _GRADE_STYLES[min(max(grade, 0), len(_GRADE_STYLES) - 1)]


def _shown_grade(grade: int | None) -> str:
    return "-" if grade is None else str(grade)


def _legend(context: Context, encoded: EncodedContext, num_pairs: int) -> Text:
    from rich.text import Text

    text = Text(f"context {context.context_id}", style="bold")
    parts = (
        f"{encoded.prefix_length} prefix + {encoded.query_length} query branch + {encoded.calibration_length} "
        "calibration branch"
    )
    text.append(
        f"\n{len(context.documents)} documents, {num_pairs} pairs, {encoded.length} tokens ({parts})\n",
        style="not bold",
    )
    text.append("grades: ", style="not bold")
    for grade in (0, 1, 2, 3, None):
        text.append(f" {_shown_grade(grade)} ", style=f"reverse not bold {_style(grade)}")
    text.append("  query rows: ", style="not bold")
    text.append(" I_q ", style=f"reverse {_QUERY_STYLE}")
    return text


def _prompt(context: Context, order: list[int], encoded: EncodedContext, tokenizer: Any, words: int) -> Text:
    """The text of the tokens: frame in grey, documents in the colour of their grade, rows of I_q marked."""
    from rich.text import Text

    def decode(begin: int, end: int) -> str:
        return tokenizer.decode(encoded.input_ids[begin:end].tolist(), clean_up_tokenization_spaces=False)

    text, position = Text(), 0
    for index, (begin, end) in zip(order, encoded.document_spans, strict=True):
        text.append(decode(position, begin), style=_FRAME_STYLE)
        text.append(_first_words(decode(begin, end), words), style=_style(context.documents[index].grade))
        position = end
    stop = encoded.prefix_length + encoded.query_length
    for rows, limit in ((encoded.query_rows, stop), (encoded.calibration_rows, encoded.length)):
        if rows[1] > rows[0]:
            text.append(decode(position, rows[0]), style=_FRAME_STYLE)
            text.append(decode(*rows), style=f"reverse {_QUERY_STYLE}")
            text.append(decode(rows[1], limit), style=_FRAME_STYLE)
            position = limit
            text.append(
                "\n\n— calibration branch, sees the documents but not the query —\n\n"
                if limit == stop < encoded.length
                else "\n",
                "italic dim",
            )
    return text


def _first_words(text: str, words: int) -> str:
    listed = text.split()
    return (
        text
        if len(listed) <= words
        else " " * text.startswith(" ") + " ".join(listed[:words]) + f" … ({len(listed) - words} more words)"
    )


def _table(context: Context, order: list[int], encoded: EncodedContext, pairs: np.ndarray) -> RenderableType:
    """One row per document: where it stands, what it was judged, and which documents it should beat."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "rank", "document", "grade", "tokens", "preferred over"):
        table.add_column(name, justify="left" if name in ("document", "preferred over") else "right")
    for place, (index, (begin, end)) in enumerate(zip(order, encoded.document_spans, strict=True)):
        document = context.documents[index]
        beaten = " ".join(f"[{other + 1}]" for other in pairs[pairs[:, 0] == place, 1])
        cells = [
            f"[{place + 1}]",
            str(document.rank),
            document.doc_id,
            _shown_grade(document.grade),
            f"{begin}-{end}",
            beaten,
        ]
        table.add_row(*(cell.replace("[", r"\[") for cell in cells), style=_style(document.grade))
    return table
