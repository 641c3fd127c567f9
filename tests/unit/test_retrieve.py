"""BM25 retrieval: Lucene's terms, Lucene's formula, the same order everywhere, and files that trec_eval reads the
same way.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_tools.analysis import Analyser
from data_tools.retrieve import Bm25Index, search_all, strictly_decreasing
from headrank.commands import main
from headrank.errors import InputError
from headrank.evaluation.measures import evaluate_run
from headrank.formats import Candidate, Collection, Document, iterate_corpus, read_run, write_jsonl

TOLERANCE = 1e-5  # bm25s adds float32 numbers, the reference float64
WORDS = "flea violin concrete rosin floor string month warm host bow cost grip dollar life cycle".split()


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The Fleas' life-cycle, and the host's blood", ["flea", "life", "cycl", "host", "blood"]),
        ("U.S. prices rose 1,000.5% in 2023", ["u.", "price", "rose", "1,000.5", "2023"]),
        ("don't isn’t", ["don't", "isn’t"]),
        ("café naïve_word x:y 10:30", ["café", "naïve_word", "x:y", "10", "30"]),
        ("to be or not to be ___", []),
        ("us vs possibly etiology biology assembly", ["us", "vs", "possibl", "etiolog", "biologi", "assembl"]),
        (
            "Ph.D.s C++ 12a.b b.12 foo@bar.com $5.00 中文 ©",
            ["ph.d.", "c", "12a.b", "b", "12", "foo", "bar.com", "5.00", "中", "文", "©"],
        ),
        ("", []),
    ],
)
def test_terms_are_cut_as_lucene_cuts_them(text: str, terms: list[str]) -> None:
    """The expected terms were printed by the analyser of Pyserini 1.6."""
    assert Analyser()(text) == terms


def toy_documents(count: int = 40) -> list[Document]:
    rng = random.Random(7)
    return [
        Document(f"d{n}", rng.choice(WORDS), " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))) for n in range(count)
    ]


def slow_bm25(documents: list[Document], query: str, k1: float, b: float) -> dict[str, float]:
    """Lucene's formula with loops."""
    analyse = Analyser()
    counts = {document.doc_id: Counter(analyse(f"{document.title} {document.text}")) for document in documents}
    lengths = {doc_id: sum(count.values()) for doc_id, count in counts.items()}
    mean_length = sum(lengths.values()) / len(lengths)
    scores: dict[str, float] = {}
    for term in analyse(query):
        frequency = sum(1 for count in counts.values() if count[term])
        weight = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
        for doc_id, count in counts.items():
            if count[term]:
                norm = k1 * (1 - b + b * lengths[doc_id] / mean_length)
                scores[doc_id] = scores.get(doc_id, 0.0) + weight * count[term] / (count[term] + norm)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75)])
@pytest.mark.parametrize(
    "query", ["flea life cycle", "cost of concrete floors", "violin violin bow", "unheard words and a flea"]
)
def test_scores_are_lucenes_formula(query: str, k1: float, b: float) -> None:
    documents = toy_documents()
    expected = slow_bm25(documents, query, k1, b)
    found = Bm25Index(documents, k1, b).search(query, len(documents))
    assert {doc_id for doc_id, _ in found} == set(expected)
    for doc_id, score in found:
        assert score == pytest.approx(expected[doc_id], rel=TOLERANCE)


def test_equal_scores_are_ordered_by_id_whatever_the_order_of_the_corpus_and_the_cut() -> None:
    documents = [Document(name, "", "flea") for name in "hbdface"] + [Document("x", "", "flea flea")]
    for seed in range(5):
        random.Random(seed).shuffle(documents)
        index = Bm25Index(documents)
        whole = [doc_id for doc_id, _ in index.search("flea", 10)]
        assert whole == ["x", *"abcdefh"]
        for top_k in range(1, 9):
            assert [doc_id for doc_id, _ in index.search("flea", top_k)] == whole[:top_k]


def test_written_scores_strictly_decrease_in_single_precision() -> None:
    ranked = strictly_decreasing([("a", 1.5), ("b", 1.5), ("c", 1.5 - 1e-12), ("d", 0.25), ("e", 0.25)])
    scores = np.array([score for _, score in ranked], np.float32)
    assert (np.diff(scores) < 0).all()
    assert scores[0] == np.float32(1.5)
    assert scores[3] == np.float32(0.25)


def test_queries_without_known_terms_find_nothing() -> None:
    index = Bm25Index(toy_documents())
    assert index.search("xylophone", 5) == []
    assert index.search("the of", 5) == []
    assert search_all(index, {"q1": "flea", "q2": "xylophone"}, 3).keys() == {"q1"}
    assert Bm25Index([Document("d", "", "of the")]).search("flea", 5) == []


def test_a_repeated_document_and_impossible_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="'d' appears twice"):
        Bm25Index([Document("d", "", "x"), Document("d", "", "y")])
    with pytest.raises(InputError, match="b between 0 and 1"):
        Bm25Index(toy_documents(), b=2.0)


def test_the_command_writes_a_run_that_scores_and_ranks_agree_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(
        tmp_path / "corpus.jsonl", ({"docid": d.doc_id, "title": d.title, "text": d.text} for d in toy_documents())
    )
    (tmp_path / "queries.tsv").write_text("q1\tflea life cycle\nq2\txylophone\n")
    outputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for output in outputs:
        assert main(["retrieve", "--collection", str(tmp_path), "--output", str(output), "--top-k", "7"]) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert "1 queries found nothing" in capsys.readouterr().err
    run = read_run(outputs[0])
    assert list(run) == ["q1"]
    assert len(run["q1"]) == 7
    assert [row.rank for row in run["q1"]] == list(range(1, 8))
    scores = [row.score for row in run["q1"]]
    assert scores == sorted(set(scores), reverse=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--output"),
        (["--output", "x", "--tag", "two words"], "one word"),
        (["--output", "x", "--index", "i"], "--engine pyserini"),
        (["--output", "x", "--queries", "absent.tsv", "--corpus", "absent.jsonl"], "no such file"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieve", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_nfcorpus_is_within_half_a_point_of_anserini(shared_data: Path) -> None:
    collection = Collection.open(shared_data / "nfcorpus")
    index = Bm25Index(iterate_corpus(collection.corpus_path))
    found = search_all(index, collection.queries(), 10)
    run = {
        query_id: [Candidate(doc_id, rank, score) for rank, (doc_id, score) in enumerate(rows, 1)]
        for query_id, rows in found.items()
    }
    ours, given = (
        evaluate_run(each, collection.qrels(), ["nDCG@10"]).mean("nDCG@10") for each in (run, collection.run())
    )
    assert given == pytest.approx(0.3218, abs=5e-5)
    assert abs(ours - given) < 0.005


@pytest.mark.parametrize(("k1", "b"), [(float("nan"), 0.4), (-1.0, 0.4), (1e308, 0.4), (0.9, 2.0), (0.9, float("nan"))])
def test_parameters_out_of_range_are_refused_before_anything_is_read(k1: float, b: float) -> None:
    with pytest.raises(InputError, match="k1 between 0 and 1000 and b between 0 and 1"):
        Bm25Index(iter([]), k1, b)


def test_a_repeated_document_is_named_with_its_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", [{"docid": name, "text": "word"} for name in ("a", "b", "a")])
    with pytest.raises(InputError, match=r"corpus\.jsonl:3: document id 'a' appears twice"):
        list(iterate_corpus(tmp_path / "corpus.jsonl"))
