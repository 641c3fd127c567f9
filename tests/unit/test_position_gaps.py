"""Lists that are spread over positions: the same tokens, further apart, the same gaps whenever they are asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.position_gaps import spread
from data_tools.training_set import TrainingSet
from headrank.method.attention import batch_contexts
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import EncodedContext, PromptEncoder
from headrank.reranking.reader import AttentionReader
from tests.tiny_models import make_tiny_model, tiny_tokenizer
from tests.toy_collections import write_training_files

EQUAL = 1e-6  # float32 noise of one small forward


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(), PromptTemplate())


@pytest.fixture(scope="module")
def context(encoder: PromptEncoder) -> EncodedContext:
    return encoder.encode("what do fleas eat", [("", "the cat"), ("", "sat on the mat"), ("", "with fleas")])


def positions(context: EncodedContext) -> list[int]:
    return batch_contexts([context])[1].position_ids_BS[0].tolist()


def test_gaps_move_everything_after_their_document_in_both_branches(context: EncodedContext) -> None:
    moved = np.array(positions(dataclasses.replace(context, position_gaps=(5, 0, 7)))) - positions(context)
    first, last = context.document_spans[0][1], context.document_spans[2][1]
    assert moved.tolist() == [0] * first + [5] * (last - first) + [12] * (context.length - last)


@settings(max_examples=50, deadline=None)
@given(span=st.integers(1, 4000), name=st.text(max_size=5))
def test_a_spread_list_keeps_its_tokens_and_ends_within_the_span(context: EncodedContext, span: int, name: str) -> None:
    made = spread(context, span, name, 1)
    assert made.position_gaps == spread(context, span, name, 1).position_gaps
    np.testing.assert_array_equal(made.input_ids, context.input_ids)
    assert all(gap >= 0 for gap in made.position_gaps)
    end = max(positions(made))
    assert end == max(positions(context)) + sum(made.position_gaps)
    assert end < max(span, max(positions(context)) + 1)


def test_spans_and_places_of_the_gaps_differ_from_list_to_list(context: EncodedContext) -> None:
    made = [spread(context, 1000, f"list {number}", 1).position_gaps for number in range(200)]
    totals = np.array([sum(gaps) for gaps in made])
    assert len(set(made)) > 190
    assert abs(totals.mean() - (1000 - context.prefix_length) / 2) < 80  # drawn evenly: a deviation of the mean is about 20
    assert all(abs(np.mean([gaps[place] for gaps in made]) - totals.mean() / 3) < 50 for place in range(3))


def test_a_list_longer_than_the_span_stays_as_it_is(context: EncodedContext) -> None:
    assert spread(context, context.prefix_length, "list", 1) is context


def test_the_model_reads_the_distance(tmp_path: Path, context: EncodedContext) -> None:
    reader = AttentionReader.load(make_tiny_model(tmp_path / "model", "llama"))
    heads = {0: [0, 1], 1: [0, 1]}

    def rows(gaps: tuple[int, ...]) -> torch.Tensor:
        return reader.read([dataclasses.replace(context, position_gaps=gaps)], heads).query_rows[1]

    assert torch.allclose(rows(()), rows((0, 0, 0)), atol=EQUAL)
    assert not torch.allclose(rows(()), rows((0, 0, 300)), atol=EQUAL)


def test_a_training_set_spreads_its_lists_the_same_way_each_time(tmp_path: Path, encoder: PromptEncoder) -> None:
    folder = write_training_files(tmp_path)
    close = TrainingSet(folder, encoder, permutations=1)
    one, two = (TrainingSet(folder, encoder, permutations=1, position_span=900, seed=seed) for seed in (1, 2))
    for number in range(close.num_contexts):
        gaps = one.whole_context(number, 1).encoded.position_gaps
        assert close.whole_context(number, 1).encoded.position_gaps == ()
        assert len(gaps) == len(close.whole_context(number, 1).grades)
        assert gaps == two.whole_context(number, 1).encoded.position_gaps, "cached reference scores survive another seed"
