"""Reranking with a late readout, and with log masses in one prompt: one interface, no score moved by a list,
passages computed once.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrank import HeadRankReranker, HeadSet, InputError, PromptTemplate
from headrank.commands import main
from headrank.formats import read_run
from headrank.method.readout import Readout
from headrank.reranking.key_source import KeptKeys, RecentPassages, passage_digest
from headrank.reranking.late_reader import LateReader
from headrank.reranking.late_reranker import LateReranker
from headrank.reranking.prompt_reranker import PromptReranker, shared_scores
from headrank.reranking.reader import AttentionReader
from tests.slow_reference import eager_attention
from tests.tiny_models import make_tiny_model

LATE = PromptTemplate(
    opening="<|im_start|>user\n",
    instruction="Query: ",
    use_chat_template=False,
    document_layout="late",
    branch_position=64,
)
PAIRS = ((2, 3), (0, 1), (2, 0), (1, 7))
READOUT = Readout(weights=(0.7, -1.5, 2.0, 0.4), floor=0.1, offsets=(-1.0, 0.5, 0.0, -2.0))
HEADS = HeadSet(PAIRS, "readout", "tiny", 4, 8, prompt=LATE, readout=READOUT)
QUERIES = ("how long does a flea live", "how much do concrete floors cost", "why does a bow need rosin")


def texts(count: int, longest: int = 14) -> list[str]:
    words = "the flea lives for two months and a floor costs six dollars while rosin helps the bow".split()
    return [
        " ".join(random.Random(number).choices(words, k=1 + number % longest)) + f" {number}" for number in range(count)
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def reranker(directory: Path) -> LateReranker:
    made = HeadRankReranker.from_pretrained(directory, HEADS)
    assert isinstance(made, LateReranker)
    return made


class CountingReader:
    """The rows that a late reader computes, batch by batch."""

    def __init__(self, late: LateReader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        made = late._keys_of

        def counted(rows: Sequence[np.ndarray], bucket: int, size: int) -> object:
            self.rows += len(rows)
            return made(rows, bucket, size)

        monkeypatch.setattr(late, "_keys_of", counted)


def test_heads_decide_how_a_list_is_read(reranker: LateReranker) -> None:
    assert reranker.layers_used == 3 == reranker.reader.loaded_layers
    parallel = dataclasses.replace(HEADS, prompt=PromptTemplate(document_layout="parallel"))
    assert isinstance(
        HeadRankReranker.from_reader(AttentionReader.load(reranker.reader.name), parallel), PromptReranker
    )
    rows = reranker.rank(QUERIES[0], texts(5), top_k=3, return_documents=True)
    assert len(rows) == 3 and rows[0]["score"] > rows[1]["score"] > rows[2]["score"] and rows[0]["text"] in texts(5)
    with pytest.raises(InputError, match="late layout only"):
        HeadRankReranker.from_pretrained(reranker.reader.name, "all", key_source=RecentPassages())


def test_a_score_is_the_same_bits_alone_in_any_batch_and_from_memory(directory: Path) -> None:
    documents = texts(24)
    cold = HeadRankReranker.from_pretrained(directory, HEADS, key_cache_bytes=0)
    warm = HeadRankReranker.from_pretrained(directory, HEADS)
    requests = [(query, documents[start : start + 16]) for start, query in zip((0, 8, 4), QUERIES, strict=True)]
    together = [result.scores for result in cold.score_batch(requests)]
    for (query, passages), scores in zip(requests, together, strict=True):
        for _ in range(2):  # the second time from memory
            np.testing.assert_array_equal(warm.score(query, passages), scores)
        np.testing.assert_array_equal(warm.score(query, passages[::-1])[::-1], scores)
        np.testing.assert_array_equal(warm.score(query, passages[5:6]), scores[5:6])
    assert np.ptp(together[0]) > 0.1, "the tiny model must tell passages apart"


def test_a_query_too_long_for_one_product_meets_its_passages_a_few_at_a_time_with_the_same_bits(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = texts(24)
    whole = HeadRankReranker.from_pretrained(directory, HEADS).score(QUERIES[0], documents)
    for most in (1, 20_000):
        monkeypatch.setattr("headrank.reranking.late_reranker._MOST_LOGITS", most)
        np.testing.assert_array_equal(
            HeadRankReranker.from_pretrained(directory, HEADS).score(QUERIES[0], documents), whole
        )


def test_where_keys_came_from_is_counted(directory: Path) -> None:
    reranker = HeadRankReranker.from_pretrained(directory, HEADS)
    assert isinstance(reranker, LateReranker)
    documents = texts(6)
    reranker.score(QUERIES[0], documents)
    once = dataclasses.replace(reranker.usage)
    reranker.score(QUERIES[1], [*documents, "a new one"])
    assert (once.recent_asked, once.recent_found) == (6, 0) and (
        reranker.usage.recent_asked,
        reranker.usage.recent_found,
    ) == (13, 6)
    assert once.tokens_read == once.tokens_computed > 0
    assert reranker.usage.tokens_read > reranker.usage.tokens_computed > once.tokens_computed
    assert reranker.usage.store_asked == 0


def test_a_passage_in_many_lists_is_computed_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reranker = HeadRankReranker.from_pretrained(directory, HEADS)
    assert isinstance(reranker, LateReranker)
    counting = CountingReader(reranker.late, monkeypatch)
    documents = texts(12)
    reranker.score_batch([(query, documents) for query in QUERIES])
    assert counting.rows == 12, "in one call"
    reranker.score_batch([(QUERIES[0], documents[::-1]), (QUERIES[1], [*documents, "a new one"])], batch_size=1)
    assert counting.rows == 13, "and in later ones"


def test_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    def keys(tokens: int) -> KeptKeys:
        return KeptKeys(torch.zeros(2, tokens, 4))

    memory = RecentPassages(num_bytes=3 * keys(5).keys_ATD.numel() * 4)
    for name in "abc":
        memory.keep(("", name), keys(5))
    memory.find([("", "a")])
    memory.keep(("", "d"), keys(5))
    assert [found is not None for found in memory.find([("", name) for name in "abcd"])] == [True, False, True, True]
    memory.keep(("", "too long"), keys(50))
    assert len(memory) == 3 and memory.used_bytes <= memory.num_bytes
    assert passage_digest(("ab", "c")) != passage_digest(("a", "bc"))


def test_a_key_source_is_checked_then_asked_before_anything_is_computed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = HeadRankReranker.from_pretrained(directory, HEADS)
    assert isinstance(filled, LateReranker)
    documents, checked = texts(10), []
    expected = filled.score(QUERIES[0], documents)

    class Store:
        def check(self, late: LateReader) -> None:
            checked.append(late.pairs)

        def find(self, documents: Sequence[tuple[str, str]]) -> list[KeptKeys | None]:
            return [
                None if text.endswith(" 3") else keys
                for (_, text), keys in zip(documents, filled.recent.find(documents), strict=True)
            ]

    reranker = HeadRankReranker.from_pretrained(directory, HEADS, key_source=Store())
    assert isinstance(reranker, LateReranker) and checked == [reranker.late.pairs]
    counting = CountingReader(reranker.late, monkeypatch)
    np.testing.assert_array_equal(reranker.score(QUERIES[0], documents), expected)
    assert counting.rows == 1


def test_empty_passages_come_last_and_shortening_is_said_of_the_list_it_happened_in(reranker: LateReranker) -> None:
    long = "a flea lives " * 60
    plain, mixed = reranker.score_batch([(QUERIES[0], ["a flea", "a floor"]), (QUERIES[0], ["", "a flea", long, "  "])])
    assert not plain.is_shortened and mixed.is_shortened
    assert set(np.argsort(mixed.scores)[:2]) == {0, 3}
    again = reranker.score_batch([(QUERIES[0], [long])])[0]
    assert again.is_shortened and again.scores[0] == mixed.scores[2], "also from memory"
    assert mixed.num_tokens > plain.num_tokens and mixed.positions == ()


@pytest.mark.parametrize(("query", "documents", "said"), [(" ", ["a"], "empty query"), ("flea", [], "no documents")])
def test_bad_requests_are_one_clear_line(reranker: LateReranker, query: str, documents: list, said: str) -> None:
    with pytest.raises(InputError, match=said):
        reranker.rank(query, documents)


def test_what_explain_shows_adds_up_to_the_score(reranker: LateReranker) -> None:
    documents = ["the flea lives for two months", "concrete floors", "rosin helps the bow grip the string"]
    detailed = reranker.explain(QUERIES[0], documents)
    np.testing.assert_array_equal(detailed.scores, reranker.score(QUERIES[0], documents))
    assert np.allclose(detailed.per_head.sum(0), detailed.scores, atol=1e-5)
    assert detailed.query == QUERIES[0] and detailed.query_offsets is not None
    for index, tokens in enumerate(detailed.tokens):
        assert tokens.matches is not None
        assert tokens.matches.shape == (4, len(detailed.query_offsets), len(tokens.offsets))
        assert np.allclose(tokens.matches.sum((1, 2)), detailed.per_head[:, index], atol=1e-5)
        assert tokens.text == documents[index]


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
def test_log_masses_of_a_prompt_equal_the_logarithm_of_eager_attention(directory: Path, layout: str) -> None:
    """The slow reference: whole probabilities per row, summed over each document and over the opening, then the
    logarithm.
    """
    heads = dataclasses.replace(HEADS, prompt=PromptTemplate(document_layout=layout))
    reranker = HeadRankReranker.from_pretrained(directory, heads)
    assert isinstance(reranker, PromptReranker)
    documents = [("Flea", "The flea lives for two months."), ("", "Concrete floors cost six dollars."), ("", "A")]
    context = reranker.encoder.encode(QUERIES[0], sorted(documents) if layout == "parallel" else documents)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    attention = eager_attention(model, context, list(context.input_ids))
    first_row, last_row = context.query_rows
    opening = context.document_spans[0][0]
    expected = np.zeros(3)
    for weight, offset, (layer, head) in zip(READOUT.weights, READOUT.offsets, PAIRS, strict=True):
        probabilities_RS = attention[layer][head, first_row:last_row].double().numpy()
        base = probabilities_RS[:, :opening].sum(-1)
        for number, (first, last) in enumerate(context.document_spans):
            ratio = probabilities_RS[:, first:last].sum(-1) / base * np.exp(-offset)
            expected[number] += weight * np.log(ratio + READOUT.floor).mean()
    given = [{"title": title, "text": text} for title, text in documents]
    scores = reranker.score(QUERIES[0], given)
    in_prompt_order = scores[[documents.index(pair) for pair in sorted(documents)]] if layout == "parallel" else scores
    assert np.abs(in_prompt_order - expected).max() < 1e-4 * expected.std() + 1e-4
    detailed = reranker.explain(QUERIES[0], given)
    assert np.allclose(detailed.scores, scores, atol=1e-4)
    sums = np.array([tokens.per_head.sum() for tokens in detailed.tokens])
    assert np.allclose(sums, scores, atol=1e-3)
    assert (
        np.isfinite(reranker.score(QUERIES[0], ["", *given])).all()
        and reranker.score(QUERIES[0], ["", *given]).argmin() == 0
    )


def test_a_readout_of_equal_weights_on_masses_is_the_papers_score(directory: Path) -> None:
    paper = HeadSet(PAIRS, "entropy", "tiny", 4, 8)
    weighted = dataclasses.replace(paper, readout=Readout("mass", weights=(1.0,) * 4, is_calibrated=True))
    doubled = dataclasses.replace(paper, readout=Readout("mass", weights=(2.0,) * 4))
    reader = AttentionReader.load(directory)
    requests = [(query, texts(4)) for query in QUERIES]
    ours, same, raw = (HeadRankReranker.from_reader(reader, heads) for heads in (paper, weighted, doubled))
    bare = HeadRankReranker.from_reader(reader, paper, calibrate=False)
    for request in requests:
        assert np.allclose(ours.score(*request), same.score(*request), atol=1e-7)
        assert np.allclose(2 * bare.score(*request), raw.score(*request), atol=1e-6)
    logs = HeadRankReranker.from_reader(reader, dataclasses.replace(HEADS, prompt=PromptTemplate()))
    for (shared_paper, shared_logs), request in zip(shared_scores([ours, logs], requests), requests, strict=True):
        assert np.allclose(shared_paper.scores, ours.score(*request), atol=1e-6)
        assert np.allclose(shared_logs.scores, logs.score(*request), atol=1e-4)


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    passages = texts(9)
    (tmp_path / "queries.tsv").write_text("".join(f"q{number}\t{query}\n" for number, query in enumerate(QUERIES)))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"docid": f"d{n}", "title": "", "text": t}) + "\n" for n, t in enumerate(passages))
    )
    run = [f"q{number} Q0 d{place} {place + 1} {9 - place} bm25\n" for number in range(3) for place in range(9)]
    (tmp_path / "run.bm25.txt").write_text("".join(run))
    (tmp_path / "qrels.txt").write_text("q0 0 d1 1\nq1 0 d2 1\nq2 0 d3 1\n")
    HEADS.save(tmp_path / "heads.json")
    return tmp_path


def test_rerank_benchmark_and_view_take_late_heads(
    directory: Path, collection: Path, tmp_path: Path, reranker: LateReranker
) -> None:
    common = [
        "--model",
        str(directory),
        "--heads",
        str(collection / "heads.json"),
        "--collection",
        str(collection),
        "--device",
        "cpu",
    ]
    assert (
        main(["rerank", *common, "--output", str(tmp_path / "run.txt"), "--scores", str(tmp_path / "scores.jsonl")])
        == 0
    )
    expected = reranker.score(QUERIES[1], texts(9))
    found = {row.doc_id: row.score for row in read_run(tmp_path / "run.txt")["q1"]}
    assert [found[f"d{place}"] for place in range(9)] == pytest.approx(expected.tolist(), rel=1e-5)
    assert main(["view", *common, "--query", "q1", "--output", str(tmp_path / "view.html")]) == 0
    data = json.loads((tmp_path / "view.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [sum(row["scores"]) for row in data["rows"]] == pytest.approx(sorted(expected, reverse=True), rel=1e-2)
    for row in data["rows"]:  # what query words found adds up to the score too
        assert np.sum(row["answers"]) == pytest.approx(sum(row["scores"]), abs=0.05)
        assert len(row["answers"]) == len(QUERIES[1].split())
    assert '<select id="query-word">' in (tmp_path / "view.html").read_text()
    matrix = ["benchmark", "run", "--models", str(directory), "--methods", "headrank", "--benchmarks", str(collection)]
    assert (
        main(
            [*matrix, "--heads", str(collection / "heads.json"), "--output", str(tmp_path / "cells"), "--device", "cpu"]
        )
        == 0
    )
    cell = next((tmp_path / "cells").rglob("run.txt"))
    assert [row.doc_id for row in read_run(cell)["q1"]] == [row.doc_id for row in read_run(tmp_path / "run.txt")["q1"]]
