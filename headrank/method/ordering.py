"""Where documents stand in a prompt: the retriever's order, its reverse, fixed random orders, and the sorted one of the
parallel layout.

Every caller takes its order from here: reranking, head selection, the token cache of training. An order is a list of
retriever ranks (from 0), in the sequence in which their documents stand in the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from headrank.method.prompt import PromptTemplate
from headrank.seeds import generator

ShuffleUse = Literal["rerank", "select-heads", "train"]


def retriever_order(template: PromptTemplate, num_documents: int) -> list[int]:
    """Best first, or best last where the template's ``order`` is reversed."""
    ranks = list(range(num_documents))
    return ranks if template.order == "retriever" else ranks[::-1]


def reranking_order(template: PromptTemplate, documents: Sequence[tuple[str, str]]) -> list[int]:
    """The order in which a given list is read: that of the template, or sorted by text in the parallel layout.

    There the order changes no score but the last digits of floating-point sums; sorted, not even those depend on the
    list's order.
    """
    if template.is_parallel:
        return sorted(range(len(documents)), key=lambda index: documents[index])
    return retriever_order(template, len(documents))


def random_order(num_documents: int, use: ShuffleUse, seed: int, list_id: str, number: int = 1) -> list[int]:
    """The ``number``-th random order of one list, fixed by use, seed, list id and number alone.

    So a subset of the queries, another machine or a resumed run gets the same orders. The keys are spelled differently
    for each use, and the training orders come from another generator. Do not make them one: published heads, trained
    models and shuffled runs were made with exactly these orders.
    """
    if use == "train":
        return generator(seed, "document-order", number, list_id).permutation(num_documents).tolist()
    order = list(range(num_documents))
    random.Random(f"{seed}/{list_id}" if use == "rerank" else f"{seed}:{list_id}:{number}").shuffle(order)
    return order


def selection_order(template: PromptTemplate, num_documents: int, *, seed: int, list_id: str, number: int) -> list[int]:
    """The order of a list in head selection: the template's for ``number`` 0, a random one (turned round like it)
    for 1, 2, ...
    """
    order = retriever_order(template, num_documents)
    if number == 0:
        return order
    shuffled = random_order(num_documents, "select-heads", seed, list_id, number)
    return [shuffled[rank] for rank in order]


def training_order(template: PromptTemplate, num_documents: int, *, seed: int, list_id: str, number: int) -> list[int]:
    """The order of a training list: the template's for ``number`` 0, a random one for 1, 2, ..."""
    return (
        random_order(num_documents, "train", seed, list_id, number)
        if number
        else retriever_order(template, num_documents)
    )


def order_numbers(permutations: int, with_retriever_order: bool) -> list[int]:
    """Numbers of the orders a list is read in: 0 is the retriever's, 1, 2, ... are random."""
    return ([0] if with_retriever_order or not permutations else []) + list(range(1, permutations + 1))


def prompt_positions(order: Sequence[int]) -> list[int]:
    """The place (from 1) at which each document of a list stands in a prompt of this order."""
    positions = [0] * len(order)
    for place, document in enumerate(order, start=1):
        positions[document] = place
    return positions
