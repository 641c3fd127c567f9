"""The lists that are trained on, and lists of labelled paragraphs, as head selection reads them."""

from __future__ import annotations

from pathlib import Path

from data_tools.contexts import CONTEXTS_FILE, iterate_contexts
from data_tools.sources.paragraph_json import read_questions
from headrank.method.ordering import order_numbers, selection_order
from headrank.method.prompt import PromptTemplate
from headrank.selection.selection import SelectionContext


def training_contexts(
    folder: str | Path,
    template: PromptTemplate,
    *,
    permutations: int = 0,
    with_retriever_order: bool = True,
    seed: int = 0,
) -> list[SelectionContext]:
    """The lists of a folder of 'headrank pairs' with the grades they have there, in the orders that are asked for."""
    lists = list(iterate_contexts(Path(folder) / CONTEXTS_FILE))
    contexts = []
    for order in order_numbers(permutations, with_retriever_order):
        for context in lists:
            ranks = selection_order(
                template, len(context.documents), seed=seed, list_id=context.context_id, number=order
            )
            listed = [context.documents[rank] for rank in ranks]
            contexts.append(
                SelectionContext(
                    collection=context.context_id.split("/")[0],
                    query_id=context.query_id,
                    order=order,
                    query=context.query,
                    documents=tuple((document.title, document.text) for document in listed),
                    grades=tuple(None if document.grade is None else max(document.grade, 0) for document in listed),
                )
            )
    return contexts


def paragraph_contexts(
    path: str | Path,
    template: PromptTemplate,
    *,
    permutations: int = 0,
    with_retriever_order: bool = True,
    seed: int = 0,
) -> list[SelectionContext]:
    """Questions with labelled paragraphs (CoRe's and QR's detection data among others), in the file's order and in
    random ones.
    """
    questions = read_questions(path)
    contexts = []
    for order in order_numbers(permutations, with_retriever_order):
        for question in questions:
            paragraphs = question.paragraphs
            ranks = selection_order(template, len(paragraphs), seed=seed, list_id=question.query_id, number=order)
            listed = [paragraphs[rank] for rank in ranks]
            contexts.append(
                SelectionContext(
                    collection=Path(path).stem,
                    query_id=question.query_id,
                    order=order,
                    query=question.text,
                    documents=tuple((paragraph.title, paragraph.text) for paragraph in listed),
                    grades=tuple(paragraph.grade for paragraph in listed),
                )
            )
    return contexts
