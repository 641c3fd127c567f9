"""The parallel layout: scores do not depend on candidate order, and the pass equals an eager one with a whole mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.training_set import TrainingSet
from headrank.errors import InputError
from headrank.method.attention import batch_contexts, branched_context
from headrank.method.heads import HeadSet
from headrank.method.parallel_layout import block_bounds
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import EncodedContext, PromptEncoder
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from tests.slow_reference import eager_rows, slow_calibrated
from tests.tiny_models import FAMILIES, make_tiny_model, tiny_tokenizer
from tests.toy_collections import write_training_files
from tests.unit.test_reader_exactness import DOCUMENTS, QUERY

TOLERANCE = 1e-5  # float32, different summation order
SAME = 1e-6  # the same sums over keys in another order
PARALLEL = PromptTemplate(document_layout="parallel")
HEADS = HeadSet(((0, 1), (2, 3), (2, 0)), "test", "tiny", 4, 8, PARALLEL)


def as_mappings(documents: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"title": title, "text": text} for title, text in documents]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama"), HEADS)


@pytest.fixture(scope="module")
def rough(reranker: HeadRankReranker) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(reranker.reader.name, HEADS, dtype="bfloat16")


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(), PARALLEL)


def test_rows_equal_two_eager_passes_with_a_whole_mask(model_directory: Path) -> None:
    reader = AttentionReader.load(model_directory, prompt=PARALLEL)
    context = reader.encoder.encode(QUERY, DOCUMENTS)
    slow = eager_rows(str(model_directory), context)
    everything = {layer: list(range(reader.num_heads)) for layer in range(reader.num_layers)}
    capture = reader.read([context], everything, stop_early=False)
    for layer in everything:
        assert np.allclose(capture.query_rows[layer][0].numpy(), slow.query_rows[layer], atol=TOLERANCE)
        assert np.allclose(capture.calibration_rows[layer][0].numpy(), slow.calibration_rows[layer], atol=TOLERANCE)
    query, calibration = (
        [sum(rows[layer][head][token] for layer, head in HEADS.heads) for token in range(context.length)]
        for rows in (slow.query_rows, slow.calibration_rows)
    )
    scores = HeadRankReranker.from_reader(reader, HEADS).score_batch([(QUERY, as_mappings(DOCUMENTS))])[0].scores
    assert np.allclose(scores, slow_calibrated(query, calibration, list(context.document_spans)), atol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(len(DOCUMENTS))))
def test_no_order_of_the_list_changes_a_score(reranker: HeadRankReranker, order: list[int]) -> None:
    scores = reranker.score_batch([(QUERY, as_mappings(DOCUMENTS))])[0].scores
    shuffled = reranker.score_batch([(QUERY, as_mappings([DOCUMENTS[index] for index in order]))])[0].scores
    assert np.allclose(shuffled, scores[list(order)], atol=SAME)
    assert np.ptp(scores) > 1e-3, "the tiny model must tell the documents apart"


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(len(DOCUMENTS))))
def test_in_bfloat16_the_scores_are_the_same_to_the_last_bit(rough: HeadRankReranker, order: list[int]) -> None:
    scores = rough.score_batch([(QUERY, as_mappings(DOCUMENTS))])[0].scores
    documents = as_mappings([DOCUMENTS[index] for index in order])
    np.testing.assert_array_equal(rough.score_batch([(QUERY, documents)])[0].scores, scores[list(order)])
    np.testing.assert_array_equal(
        rough.explain(QUERY, documents).scores, rough.explain(QUERY, as_mappings(DOCUMENTS)).scores[list(order)]
    )


def test_the_sequential_layout_does_depend_on_the_order(reranker: HeadRankReranker) -> None:
    sequential = HeadRankReranker.from_pretrained(reranker.reader.name, HEADS, prompt=PromptTemplate())
    scores = sequential.score_batch([(QUERY, as_mappings(DOCUMENTS))])[0].scores
    backwards = sequential.score_batch([(QUERY, as_mappings(DOCUMENTS[::-1]))])[0].scores
    assert not np.allclose(backwards[::-1], scores, atol=1e-4)


def test_positions_and_blocks_of_a_small_prompt_are_those_counted_by_hand(encoder: PromptEncoder) -> None:
    context = encoder.encode("fleas", [("", "the cat"), ("", "sat on the mat")])
    (first, second), opening = block_bounds(context), block_bounds(context)[0][0]
    lengths = [first[1] - first[0], second[1] - second[0]]
    branch = opening + max(lengths)
    expected = [*range(opening), *range(opening, opening + lengths[0]), *range(opening, opening + lengths[1])]
    expected += [*range(branch, branch + context.query_length), *range(branch, branch + context.calibration_length)]
    assert batch_contexts([context])[1].position_ids_BS[0].tolist() == expected
    assert second[1] == context.prefix_length


def test_a_document_has_the_same_tokens_at_every_place_and_no_number(encoder: PromptEncoder) -> None:
    one, other = encoder.encode(QUERY, DOCUMENTS), encoder.encode(QUERY, DOCUMENTS[::-1])
    blocks = [
        [context.input_ids[start:end].tolist() for start, end in block_bounds(context)] for context in (one, other)
    ]
    assert blocks[0] == blocks[1][::-1]
    start = block_bounds(one)[0][0]
    text = encoder.tokenizer.decode(one.input_ids[start : one.prefix_length])
    assert "[1]" not in text and "[2]" not in text


def test_lists_of_different_lengths_share_a_batch(reranker: HeadRankReranker) -> None:
    requests = [
        (QUERY, as_mappings(DOCUMENTS)),
        ("what", as_mappings(DOCUMENTS[1:3])),
        ("why is it so", as_mappings(DOCUMENTS[:1])),
    ]
    together = reranker.score_batch(requests, batch_size=3)
    for request, result in zip(requests, together, strict=True):
        assert np.allclose(result.scores, reranker.score_batch([request])[0].scores, atol=SAME)


def test_one_long_document_does_not_make_the_others_as_long(encoder: PromptEncoder) -> None:
    context = encoder.encode(QUERY, [*DOCUMENTS * 10, ("", "a flea " * 300)])
    blocks = batch_contexts([context])[1].blocks
    assert blocks is not None
    assert sum(group.tokens_MT.numel() for group in blocks.groups) <= 2 * context.prefix_length
    assert sum(len(group.tokens_MT) for group in blocks.groups) == 41


def test_an_empty_document_is_ranked_last_and_changes_no_other_order(reranker: HeadRankReranker) -> None:
    with_empty = reranker.score_batch([(QUERY, as_mappings([DOCUMENTS[0], ("", ""), DOCUMENTS[1]]))])[0].scores
    without = reranker.score_batch([(QUERY, as_mappings([DOCUMENTS[0], DOCUMENTS[1]]))])[0].scores
    assert with_empty.argmin() == 1
    assert (with_empty[0] > with_empty[2]) == (without[0] > without[1])


def test_a_long_list_needs_no_more_positions_and_only_long_documents_are_cut() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), PARALLEL, max_length=200)
    many = encoder.encode(QUERY, DOCUMENTS * 20)
    assert many.length > 1000 and not many.is_shortened
    assert batch_contexts([many])[1].position_ids_BS.max() < 200
    long = encoder.encode(QUERY, [*DOCUMENTS, ("", "a flea " * 200)])
    assert long.is_shortened and batch_contexts([long])[1].position_ids_BS.max() < 200
    untouched = encoder.encode(QUERY, DOCUMENTS)
    assert [end - start for start, end in long.document_spans[:4]] == [
        end - start for start, end in untouched.document_spans
    ]
    with pytest.raises(InputError, match="leaves no room for a document of 8 tokens.*shorten the query"):
        PromptEncoder(tiny_tokenizer(), PARALLEL, max_length=untouched.query_length + 12).encode(QUERY, DOCUMENTS)


def test_gradients_flow_as_through_a_dense_masked_attention(encoder: PromptEncoder) -> None:
    contexts = [encoder.encode(QUERY, DOCUMENTS), encoder.encode("what", DOCUMENTS[:2])]
    _, layout = batch_contexts(contexts)
    batch, num_tokens = layout.position_ids_BS.shape
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, heads, num_tokens, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(batch, 4, num_tokens, 8, generator=generator)
    weight[1, :, contexts[1].length :] = 0  # what padding gives is nobody's business
    mask = torch.stack([_dense_mask(context, num_tokens) for context in contexts])[:, None]
    query, key, value = tensors
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    fast = branched_context(query, key, value, layout, 0.3)
    for index, context in enumerate(contexts):
        assert torch.allclose(fast[index, :, : context.length], dense[index, :, : context.length], atol=SAME)
    expected = torch.autograd.grad((dense * weight).sum(), tensors)
    for got, wanted in zip(torch.autograd.grad((fast * weight).sum(), tensors), expected, strict=True):
        assert torch.allclose(got, wanted, atol=TOLERANCE)


def _dense_mask(context: EncodedContext, num_tokens: int) -> torch.Tensor:
    """What every token may see, written down pair by pair; padding sees itself."""
    opening, second = block_bounds(context)[0][0], context.prefix_length + context.query_length
    owner = ["padding"] * num_tokens
    owner[:opening] = ["opening"] * opening
    for number, (start, end) in enumerate(block_bounds(context)):
        owner[start:end] = [f"document {number}"] * (end - start)
    owner[context.prefix_length : second] = ["query"] * context.query_length
    owner[second : context.length] = ["calibration"] * context.calibration_length
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for row in range(num_tokens):
        for key in range(row + 1):
            branch_sees = owner[row] in ("query", "calibration") and (
                owner[key] == "opening" or owner[key].startswith("document")
            )
            document_sees = owner[row].startswith("document") and owner[key] == "opening"
            mask[row, key] = row == key or owner[row] == owner[key] or branch_sees or document_sees
    return mask


def test_a_sliding_window_is_measured_in_positions(encoder: PromptEncoder) -> None:
    context = encoder.encode(QUERY, DOCUMENTS)
    _, layout = batch_contexts([context])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, context.length, 8, generator=generator) for _ in range(3))
    positions, window = layout.position_ids_BS[0], 7
    mask = _dense_mask(context, context.length) & (positions[:, None] - positions[None, :] < window)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    assert torch.allclose(branched_context(query, key, value, layout, 0.3, window), dense, atol=SAME)


def test_prompts_of_before_keep_their_hash_and_the_switch_has_its_own() -> None:
    assert PromptTemplate().hash == "4176c0b1e286"  # as in heads.json files from before there was a layout to choose
    assert PARALLEL.hash != PromptTemplate().hash
    assert PromptTemplate.from_dict(PARALLEL.to_dict()) == PARALLEL
    with pytest.raises(InputError, match="document_layout 'diagonal' is not one of sequential, parallel"):
        PromptTemplate(document_layout="diagonal")  # type: ignore[arg-type]


def test_training_samples_come_from_the_cache_side_by_side(tmp_path: Path, encoder: PromptEncoder) -> None:
    write_training_files(tmp_path)
    sample = TrainingSet(tmp_path, encoder).at(0)
    again = TrainingSet(tmp_path, encoder).at(0)  # from the files of the first
    assert sample.encoded.is_parallel and again.encoded.is_parallel
    assert batch_contexts([again.encoded])[1].blocks is not None
    sequential = TrainingSet(tmp_path, PromptEncoder(tiny_tokenizer(), PromptTemplate())).at(0)
    assert not sequential.encoded.is_parallel
