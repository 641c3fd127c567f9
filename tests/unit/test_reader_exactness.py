"""One truncated pass equals two full eager passes, for every decoder family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrank.method.attention import batch_contexts
from headrank.method.heads import HeadSet
from headrank.method.prompt import QUERY_ROWS, PromptTemplate
from headrank.method.scores import entropy, sum_over_documents
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from tests.slow_reference import eager_rows, slow_calibrated, slow_entropy, slow_masses
from tests.tiny_models import FAMILIES, make_tiny_model

TOLERANCE = 1e-5  # float32, different summation order
QUERY = "how long does a flea live"
DOCUMENTS = [
    ("Flea", "The flea lives for about two to three months and needs a warm host."),
    ("", "Concrete floors cost between two and six dollars a square foot."),
    ("Violin", "Rosin makes the bow grip the string of a violin, so that it sings and does not slip at all."),
    ("", "A"),
]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def all_heads(reader: AttentionReader) -> dict[int, list[int]]:
    return {layer: list(range(reader.num_heads)) for layer in range(reader.num_layers)}


@pytest.mark.parametrize("query_rows", QUERY_ROWS)
def test_masses_scores_and_entropies_equal_two_eager_passes(model_directory: Path, query_rows: str) -> None:
    reader = AttentionReader.load(model_directory, prompt=PromptTemplate(query_rows=query_rows))
    context = reader.encoder.encode(QUERY, DOCUMENTS)
    slow = eager_rows(str(model_directory), context)
    capture = reader.read([context], all_heads(reader), stop_early=False)
    layout, spans = capture.layout, list(context.document_spans)
    for layer in range(reader.num_layers):
        fast = capture.query_rows[layer]
        masses = sum_over_documents(fast, layout.document_of_token_BS, layout.num_documents)[0]
        for head in range(reader.num_heads):
            assert np.allclose(masses[head].numpy(), slow_masses(slow.query_rows[layer][head], spans), atol=TOLERANCE)
            assert np.allclose(
                capture.calibration_rows[layer][0, head].numpy(), slow.calibration_rows[layer][head], atol=TOLERANCE
            )
            assert float(entropy(fast[0, head])) == pytest.approx(slow_entropy(slow.query_rows[layer][head]), abs=1e-4)


def test_calibrated_and_raw_scores_equal_the_slow_reference_of_a_head_set(model_directory: Path) -> None:
    heads = HeadSet(((0, 1), (2, 3), (2, 0)), "test", "tiny", 4, 8)
    reranker = HeadRankReranker.from_pretrained(model_directory, heads)
    context = reranker.reader.encoder.encode(QUERY, DOCUMENTS)
    slow = eager_rows(str(model_directory), context)
    query = [sum(slow.query_rows[layer][head][token] for layer, head in heads.heads) for token in range(context.length)]
    calibration = [
        sum(slow.calibration_rows[layer][head][token] for layer, head in heads.heads) for token in range(context.length)
    ]
    documents = [{"title": title, "text": text} for title, text in DOCUMENTS]
    expected = slow_calibrated(query, calibration, list(context.document_spans))
    detailed = reranker.explain(QUERY, documents)
    assert np.allclose(reranker.score_batch([(QUERY, documents)])[0].scores, expected, atol=TOLERANCE)
    assert np.allclose(detailed.scores, expected, atol=TOLERANCE)
    assert np.allclose(detailed.per_head.sum(0), expected, atol=TOLERANCE)
    raw = (
        HeadRankReranker.from_reader(reranker.reader, heads, calibrate=False)
        .score_batch([(QUERY, documents)])[0]
        .scores
    )
    assert np.allclose(raw, slow_masses(query, list(context.document_spans)), atol=TOLERANCE)
    assert not np.allclose(raw, expected, atol=1e-3), "the tiny model must tell calibrated from raw"


def test_early_exit_equals_full_depth_bit_for_bit(model_directory: Path) -> None:
    heads = HeadSet(((1, 2), (0, 5)), "test", "tiny", 4, 8)
    truncated = HeadRankReranker.from_pretrained(model_directory, heads)
    assert truncated.reader.loaded_layers == 2
    whole = HeadRankReranker.from_reader(AttentionReader.load(model_directory), heads)
    context = whole.reader.encoder.encode(QUERY, DOCUMENTS)
    full = whole.reader.read([context], whole.by_layer, stop_early=False)
    early = truncated.reader.read([context], truncated.by_layer)
    for layer in whole.by_layer:
        assert torch.equal(full.query_rows[layer], early.query_rows[layer])
        assert torch.equal(full.calibration_rows[layer], early.calibration_rows[layer])


def test_batches_of_unequal_lengths_and_any_padding_change_nothing(model_directory: Path) -> None:
    reader = AttentionReader.load(model_directory)
    contexts = reader.encoder.encode_many(
        [(QUERY, DOCUMENTS), ("cost of concrete floors in a house", DOCUMENTS[:2]), ("rosin", DOCUMENTS[1:])]
    )
    heads = {0: [0, 3], 3: [7, 1]}
    together = reader.read(contexts, heads)
    ids, layout = batch_contexts(contexts, 0, pad_to=max(context.length for context in contexts) + 37)
    assert ids.shape[1] == layout.position_ids_BS.shape[1]
    assert all(not layout.position_ids_BS[row, context.length :].any() for row, context in enumerate(contexts)), (
        "within any model's reach"
    )
    for row, context in enumerate(contexts):
        alone = reader.read([context], heads)
        for layer in heads:
            for together_rows, alone_rows in (
                (together.query_rows, alone.query_rows),
                (together.calibration_rows, alone.calibration_rows),
            ):
                assert torch.allclose(
                    together_rows[layer][row, :, : context.length], alone_rows[layer][0], atol=TOLERANCE
                )
                assert float(together_rows[layer][row, :, context.length :].abs().sum()) == 0.0


def test_repeated_keys_give_what_grouped_ones_give(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = AttentionReader.load(model_directory)
    context = reader.encoder.encode(QUERY, DOCUMENTS)
    grouped = reader.read([context], all_heads(reader))
    # as float32 on CUDA, which is not here
    monkeypatch.setattr("headrank.method.attention._lacks_grouped_kernel", lambda query, **_: True)
    repeated = reader.read([context], all_heads(reader))
    for layer, rows in grouped.query_rows.items():
        assert torch.allclose(repeated.query_rows[layer], rows, atol=TOLERANCE)


def test_rows_sum_to_one_and_masses_never_exceed_one(model_directory: Path) -> None:
    reader = AttentionReader.load(model_directory)
    capture = reader.read([reader.encoder.encode(QUERY, DOCUMENTS)], all_heads(reader))
    for rows in [*capture.query_rows.values(), *capture.calibration_rows.values()]:
        assert torch.allclose(rows.sum(-1), torch.ones(()), atol=TOLERANCE)
        masses = sum_over_documents(rows, capture.layout.document_of_token_BS, capture.layout.num_documents)
        assert float(masses.sum(-1).max()) <= 1.0 + TOLERANCE


def test_text_after_the_query_changes_no_score(model_directory: Path) -> None:
    reader = AttentionReader.load(model_directory, prompt=PromptTemplate(query_rows="query"))
    context = reader.encoder.encode(QUERY, DOCUMENTS)
    ids = context.input_ids.copy()
    ids[context.query_rows[1] : context.prefix_length + context.query_length] = 7
    changed = type(context)(**{**vars(context), "input_ids": ids})
    before, after = reader.read([context], {3: [0, 1, 2]}), reader.read([changed], {3: [0, 1, 2]})
    assert torch.allclose(before.query_rows[3], after.query_rows[3], atol=1e-6)
    assert torch.equal(before.calibration_rows[3], after.calibration_rows[3])
