"""MTEB, BEIR, PyTerrier, ranx and rank_llm, each with the real package: lists stay whole, the scores are
HeadRankReranker's own.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank import HeadRankReranker, InputError
from headrank.evaluation.measures import evaluate_run
from headrank.formats import Candidate, Collection

ROOT = Path(__file__).resolve().parents[2]
REASON = "needs the extra 'integrations-heavy'"
QUERIES = {"1": "why does a violin bow need rosin", "2": "how long do fleas live"}
CORPUS = {
    "a": {"title": "Fleas", "text": "They live about two to three months on a warm host."},
    "b": {"title": "", "text": "Rosin makes the bow grip the string of a violin."},
    "c": {"text": "A concrete floor costs two to six dollars a square foot."},
    "d": {"title": "", "text": "The query asks for a relevant document."},
}
RUN = {"1": {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}, "2": {"d": 9.0, "a": 8.0, "b": 7.0}}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def reranker(model: str) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(model, "all")


@pytest.fixture
def asked(reranker: HeadRankReranker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(query, number of documents) of every list that was scored."""
    lists, original = list[tuple[str, int]](), type(reranker).score_batch

    def score_batch(self: HeadRankReranker, requests: Sequence[Any], **more: Any) -> Any:
        lists.extend((query, len(documents)) for query, documents in requests)
        return original(self, requests, **more)

    monkeypatch.setattr(type(reranker), "score_batch", score_batch)
    return lists


def expected(reranker: HeadRankReranker, query_id: str, depth: int | None = None) -> dict[str, float]:
    """The scores of a query's candidates, best first."""
    ids = list(RUN[query_id])[:depth]
    scores = dict(
        zip(ids, map(float, reranker.score(QUERIES[query_id], [CORPUS[doc_id] for doc_id in ids])), strict=True)
    )
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


class TestMteb:
    @pytest.fixture
    def collection(self, embedded_collection: Path, tmp_path: Path) -> Collection:
        """The first eight queries of the collection that comes with the project."""
        lines = (embedded_collection / "queries.tsv").read_text().splitlines()[:8]
        (tmp_path / "queries.tsv").write_text("\n".join(lines) + "\n")
        for name in ("corpus.jsonl", "qrels.txt", "run.bm25.txt"):
            (tmp_path / name).symlink_to(embedded_collection / name)
        return Collection.open(str(tmp_path))

    def test_a_task_of_a_collection_is_scored_as_our_own_measure_scores_it(
        self, reranker, asked, collection, tmp_path
    ) -> None:
        mteb = pytest.importorskip("mteb", reason=REASON)
        from headrank.integrations.mteb import HeadRankSearch, reranking_task

        task = reranking_task(tmp_path, name="ToyReranking", depth=6)
        result = mteb.evaluate(
            HeadRankSearch(reranker, name="org/model"), task, cache=None, co2_tracker=False, show_progress_bar=False
        )
        run, queries, qrels = collection.run(), collection.queries(), collection.qrels()
        assert asked == [(text, min(6, len(run[name]))) for name, text in queries.items()], "every list once and whole"
        texts = collection.documents({row.doc_id for name in queries for row in run[name]})
        ours = {}
        for name in queries:
            ids = [row.doc_id for row in run[name][:6]]
            scores = reranker.score(
                queries[name], [{"title": texts[one].title, "text": texts[one].text} for one in ids]
            )
            ranked = sorted(zip(ids, scores, strict=True), key=lambda item: -item[1])
            ours[name] = [
                Candidate(doc_id, place, float(score)) for place, (doc_id, score) in enumerate(ranked, start=1)
            ]
        mean = evaluate_run(ours, {name: qrels[name] for name in queries}, ["nDCG@10"]).means()["nDCG@10"]
        assert result[0].get_score() == pytest.approx(mean, abs=1e-5)
        assert result.model_name == "org/model"

    def test_a_task_without_candidates_is_refused(self, reranker) -> None:
        pytest.importorskip("mteb", reason=REASON)
        from headrank.integrations.mteb import HeadRankSearch

        with pytest.raises(InputError, match="brings no candidates"):
            HeadRankSearch(reranker).search([], top_k=10)


class TestBeir:
    def test_results_are_reranked_list_by_list_with_titles(self, reranker, asked) -> None:
        pytest.importorskip("beir.reranking", reason=REASON)
        from headrank.integrations.beir import HeadRankRerank

        found = HeadRankRerank(reranker).rerank(CORPUS, QUERIES, RUN, top_k=3)
        assert asked == [(QUERIES["1"], 3), (QUERIES["2"], 3)]
        assert {name: list(scores.items()) for name, scores in found.items()} == {
            name: list(expected(reranker, name, 3).items()) for name in RUN
        }

    def test_beirs_own_rerank_runs_on_our_cross_encoder(self, reranker) -> None:
        reranking = pytest.importorskip("beir.reranking", reason=REASON)
        from headrank.integrations.sentence_transformers import HeadRankCrossEncoder

        found = reranking.Rerank(HeadRankCrossEncoder(reranker=reranker)).rerank(CORPUS, QUERIES, RUN, top_k=4)
        plain = [f"{CORPUS[one].get('title', '')} {CORPUS[one]['text']}".strip() for one in RUN["1"]]
        np.testing.assert_allclose(
            [found["1"][one] for one in RUN["1"]], reranker.score(QUERIES["1"], plain), atol=1e-6
        )

    def test_an_unknown_document_and_a_bad_depth_are_one_line(self, reranker) -> None:
        pytest.importorskip("beir.reranking", reason=REASON)
        from headrank.integrations.beir import HeadRankRerank

        with pytest.raises(InputError, match="candidate 'x', which is not there"):
            HeadRankRerank(reranker).rerank(CORPUS, QUERIES, {"1": {"x": 1.0}}, top_k=3)
        with pytest.raises(InputError, match="top_k"):
            HeadRankRerank(reranker).rerank(CORPUS, QUERIES, RUN, top_k=0)


class TestPyTerrier:
    @pytest.fixture
    def first(self) -> Any:
        """A first stage without Java: its results as they are."""
        pt = pytest.importorskip("pyterrier", reason=REASON)
        import pandas as pd

        rows = [
            {
                "qid": name,
                "query": QUERIES[name],
                "docno": doc_id,
                "score": score,
                "rank": rank,
                "page": 7,
                "title": "",
                **CORPUS[doc_id],
            }
            for name, scores in RUN.items()
            for rank, (doc_id, score) in enumerate(scores.items())
        ]
        return pt.Transformer.from_df(pd.DataFrame(rows))

    @pytest.fixture
    def topics(self) -> Any:
        pd = pytest.importorskip("pandas", reason=REASON)
        return pd.DataFrame([{"qid": name, "query": text} for name, text in QUERIES.items()])

    def test_a_pipeline_reranks_whole_lists_and_keeps_other_columns(self, first, topics, reranker, asked) -> None:
        from headrank.integrations.pyterrier import HeadRankTransformer

        found = (first % 3 >> HeadRankTransformer(reranker))(topics)
        assert sorted(asked) == sorted((text, 3) for text in QUERIES.values())
        for name in RUN:
            rows = found[found["qid"] == name]
            assert dict(zip(rows["docno"], rows["score"], strict=True)) == pytest.approx(expected(reranker, name, 3))
            assert list(rows["docno"]) == list(expected(reranker, name, 3)) and list(rows["rank"]) == [0, 1, 2]
            assert set(rows["page"]) == {7}

    def test_an_experiment_measures_our_order(self, first, topics, reranker) -> None:
        import pandas as pd
        import pyterrier as pt

        from headrank.integrations.pyterrier import HeadRankTransformer

        best = {name: next(iter(expected(reranker, name))) for name in RUN}
        qrels = pd.DataFrame([{"qid": name, "docno": doc_id, "label": 1} for name, doc_id in best.items()])
        table = pt.Experiment(
            [first, first >> HeadRankTransformer(reranker)], topics, qrels, ["recip_rank"], names=["first", "ours"]
        )
        assert dict(zip(table["name"], table["recip_rank"], strict=True))["ours"] == 1.0

    def test_missing_text_and_two_texts_of_a_query_are_said(self, first, topics, reranker) -> None:
        from headrank.integrations.pyterrier import HeadRankTransformer

        results = first(topics)
        with pytest.raises(Exception, match="text"):
            HeadRankTransformer(reranker)(results.drop(columns=["text"]))
        with pytest.raises(InputError, match="has two texts"):
            HeadRankTransformer(reranker)(results.assign(qid="1"))

    def test_with_terriers_own_bm25(self, topics, reranker, tmp_path) -> None:
        """``bm25 >> headrank`` on a Terrier index: needs Java and Terrier's jars, which PyTerrier fetches from
        Maven.
        """
        pt = pytest.importorskip("pyterrier", reason=REASON)
        if os.environ.get("HEADRANK_TEST_TERRIER") != "1":
            pytest.skip("needs Java and Terrier's jars from Maven; set HEADRANK_TEST_TERRIER=1 to run it")
        from headrank.integrations.pyterrier import HeadRankTransformer

        documents = [{"docno": doc_id, "text": document["text"]} for doc_id, document in CORPUS.items()]
        index = pt.IterDictIndexer(str(tmp_path / "index"), meta={"docno": 20, "text": 4096}).index(documents)
        pipeline = pt.terrier.Retriever(index, wmodel="BM25", metadata=["docno", "text"]) % 3 >> HeadRankTransformer(
            reranker
        )
        assert set(pipeline(topics)["qid"]) == set(QUERIES)


class TestRanx:
    def test_a_run_comes_back_reranked_and_what_is_below_the_depth_follows(self, reranker, asked) -> None:
        ranx = pytest.importorskip("ranx", reason=REASON)
        from headrank.integrations.ranx import rerank_run

        found = rerank_run(ranx.Run(RUN, name="BM25"), QUERIES, CORPUS, reranker, depth=3)
        assert asked == [(QUERIES["1"], 3), (QUERIES["2"], 3)] and found.name == "headrank"
        listed = found.to_dict()
        assert sorted(listed["1"], key=lambda one: -listed["1"][one]) == [*expected(reranker, "1", 3), "d"]
        best = next(iter(expected(reranker, "2", 3)))
        assert ranx.evaluate(ranx.Qrels({"1": {"d": 1}, "2": {best: 1}}), found, "mrr") == pytest.approx((0.25 + 1) / 2)


class TestRankLlm:
    @pytest.fixture
    def request_(self) -> Any:
        data = pytest.importorskip("rank_llm.data", reason="needs rank-llm and dacite")
        candidates = [data.Candidate(doc_id, score, dict(CORPUS[doc_id])) for doc_id, score in RUN["1"].items()]
        return data.Request(data.Query(QUERIES["1"], 1), candidates)

    def test_a_request_becomes_a_result_that_rank_llm_writes(self, request_, reranker, tmp_path) -> None:
        from rank_llm.data import DataWriter

        from headrank.integrations.rank_llm import HeadRankRequests

        result = HeadRankRequests(reranker).rerank(request_)
        assert [(one.docid, one.score) for one in result.candidates] == list(expected(reranker, "1").items())
        assert [one.docid for one in request_.candidates] == list(RUN["1"]), "the request is not changed"
        DataWriter(result).write_in_trec_eval_format(str(tmp_path / "run.txt"))
        assert (tmp_path / "run.txt").read_text().splitlines()[0].split()[2] == next(iter(expected(reranker, "1")))

    def test_only_the_asked_ranks_are_reranked_and_scores_fall(self, request_, reranker, asked) -> None:
        from headrank.integrations.rank_llm import HeadRankRequests

        result = HeadRankRequests(reranker).rerank(request_, rank_start=1, rank_end=3)
        assert asked == [(QUERIES["1"], 2)]
        names, scores = [one.docid for one in result.candidates], [one.score for one in result.candidates]
        assert (
            names[0] == "a" and names[3] == "d" and set(names) == set("abcd") and scores == sorted(scores, reverse=True)
        )
        with pytest.raises(InputError, match="rank_start"):
            HeadRankRequests(reranker).rerank(request_, rank_start=3, rank_end=3)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("with_mteb", "mteb"),
        ("with_beir", "beir"),
        ("with_pyterrier", "pyterrier"),
        ("with_ranx", "ranx"),
        ("with_rank_llm", "rank_llm.data"),
    ],
)
def test_the_example_runs(
    name: str, package: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip(package, reason=REASON)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", model, "all"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(r"^[+-][01]\.\d{4}  ", capsys.readouterr().out, re.MULTILINE)
