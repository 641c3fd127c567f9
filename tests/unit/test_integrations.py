"""Every adapter against the real package: the order is HeadRankReranker's own, and what the ecosystem hands over
survives.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrank import HeadRankReranker, InputError
from headrank.integrations.shared_reranker import RerankerSettings, SharedReranker, document_from

ROOT = Path(__file__).resolve().parents[2]
QUERY = "why does a violin bow need rosin"
TEXTS = [
    "Fleas live about two to three months on a warm host.",
    "Rosin makes the bow grip the string of a violin.",
    "A concrete floor costs two to six dollars a square foot.",
    "The query asks for a relevant document.",
]
TITLES = ["Fleas", "", "", ""]
DOCUMENTS = dict(zip("abcd", TEXTS, strict=True))
RUN = {"1": {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}}
REASON = "needs the extra 'integrations'"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def reranker(model: str) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(model, "all")


@pytest.fixture(scope="module")
def plain(reranker: HeadRankReranker) -> np.ndarray:
    """The scores of the texts without titles."""
    return reranker.score(QUERY, TEXTS)


@pytest.fixture(scope="module")
def titled(reranker: HeadRankReranker) -> np.ndarray:
    """The scores with the title of the first text: another number, or no test below could see a lost title."""
    return reranker.score(QUERY, [{"title": title, "text": text} for title, text in zip(TITLES, TEXTS, strict=True)])


def best_first(scores: np.ndarray) -> list[int]:
    return [int(place) for place in np.argsort(-scores, kind="stable")]


def test_a_title_changes_the_scores_so_a_lost_one_is_seen(plain: np.ndarray, titled: np.ndarray) -> None:
    assert abs(plain[0] - titled[0]) > 1e-6


class TestSharedReranker:
    def test_lists_keep_their_order_and_empty_ones_cost_nothing(
        self, reranker: HeadRankReranker, plain: np.ndarray
    ) -> None:
        shared = SharedReranker(RerankerSettings("nowhere"), reranker)
        assert shared.score_lists([(QUERY, []), (QUERY, TEXTS), ("other", [])]) == [[], plain.tolist(), []]
        assert SharedReranker(RerankerSettings("nowhere")).rank(QUERY, []) == []  # not even a model is asked for

    def test_a_missing_model_is_one_clear_line(self) -> None:
        with pytest.raises(InputError, match="nowhere"):
            SharedReranker(RerankerSettings("./nowhere", "all")).rank(QUERY, TEXTS)

    @pytest.mark.parametrize("top_k", [0, -1])
    def test_top_k_below_one_is_refused(self, reranker: HeadRankReranker, top_k: int) -> None:
        with pytest.raises(InputError, match="top_k"):
            SharedReranker(RerankerSettings(), reranker).rank(QUERY, TEXTS, top_k)

    def test_the_event_loop_goes_on_while_a_list_is_scored(self, reranker: HeadRankReranker) -> None:
        scoring, go_on = threading.Event(), threading.Event()

        class Waiting:
            def score_batch(self, lists: object, batch_size: int | None = None) -> object:
                scoring.set()
                assert go_on.wait(60), "the event loop never ran while the list was scored"
                return reranker.score_batch(lists, batch_size=batch_size)

        async def rank_and_tick() -> int:
            task = asyncio.ensure_future(SharedReranker(RerankerSettings(), Waiting()).arank(QUERY, TEXTS))
            while not scoring.is_set():
                await asyncio.sleep(0.01)
            go_on.set()  # reached only by a loop that is not blocked
            return len(await task)

        assert asyncio.run(rank_and_tick()) == len(TEXTS)

    def test_threads_and_loops_share_one_model_and_get_their_own_results(self, reranker: HeadRankReranker) -> None:
        shared = SharedReranker(RerankerSettings(), reranker)
        lists = [(f"query {number}", TEXTS[number % 3 :]) for number in range(6)]
        expected = [shared.rank(*item) for item in lists]

        async def all_at_once() -> list[object]:
            return list(await asyncio.gather(*(shared.arank(*item) for item in lists)))

        assert asyncio.run(all_at_once()) == expected
        assert asyncio.run(all_at_once()) == expected  # a second event loop

    def test_copies_share_the_model_and_pickles_carry_only_settings(
        self, model: str, reranker: HeadRankReranker
    ) -> None:
        shared = SharedReranker(RerankerSettings(model, "all"), reranker)
        assert copy.deepcopy(shared).load() is reranker
        travelled = pickle.dumps(shared)
        assert len(travelled) < 1000
        assert pickle.loads(travelled).rank(QUERY, TEXTS) == shared.rank(QUERY, TEXTS)

    def test_a_title_that_is_not_text_is_no_title(self) -> None:
        assert (
            document_from("text", {"title": 3})
            == document_from("text", {"title": ""})
            == document_from("text", {})
            == "text"
        )
        assert document_from("text", {"name": "N", "title": "T"}, "name") == {"title": "N", "text": "text"}
        assert document_from("text", {"title": "T"}, None) == "text"


class TestSentenceTransformers:
    @pytest.fixture
    def encoder(self, reranker: HeadRankReranker) -> object:
        pytest.importorskip("sentence_transformers", reason=REASON)
        from headrank.integrations.sentence_transformers import HeadRankCrossEncoder

        return HeadRankCrossEncoder(reranker=reranker)

    def test_predict_gives_each_pair_the_score_of_its_list(self, encoder, reranker, plain) -> None:
        other = reranker.score("how long do fleas live", TEXTS[:2])
        pairs = [(QUERY, TEXTS[0]), ("how long do fleas live", TEXTS[0]), *((QUERY, text) for text in TEXTS[1:])]
        pairs.append(["how long do fleas live", TEXTS[1]])
        expected = [plain[0], other[0], *plain[1:], other[1]]
        assert encoder.predict(pairs, batch_size=2, show_progress_bar=False) == pytest.approx(expected, abs=1e-7)

    def test_a_pair_given_twice_is_read_once(self, encoder, plain) -> None:
        twice = encoder.predict([(QUERY, text) for text in [*TEXTS, TEXTS[1], TEXTS[1]]])
        assert twice.tolist() == [*plain.tolist(), float(plain[1]), float(plain[1])]

    def test_the_shapes_and_types_are_those_of_a_cross_encoder(self, encoder) -> None:
        import torch

        pairs = [(QUERY, text) for text in TEXTS]
        assert encoder.predict(pairs).dtype == np.float32 and encoder.predict([]).shape == (0,)
        assert isinstance(encoder.predict(pairs[0]), np.float32)
        assert encoder.predict(pairs, convert_to_tensor=True).shape == (4,)
        listed = encoder.predict(pairs, convert_to_numpy=False)
        assert isinstance(listed, list) and all(
            isinstance(score, torch.Tensor) and score.dim() == 0 for score in listed
        )

    def test_rank_is_the_rerankers_own(self, encoder, reranker) -> None:
        asked = {"top_k": 3, "return_documents": True}
        assert encoder.rank(QUERY, TEXTS, **asked, batch_size=32, show_progress_bar=True) == reranker.rank(
            QUERY, TEXTS, **asked
        )

    def test_what_only_a_classifier_could_obey_is_refused(self, encoder) -> None:
        with pytest.raises(InputError, match="activation_fn"):
            encoder.predict([(QUERY, TEXTS[0])], activation_fn=abs)
        with pytest.raises(InputError, match="pair 1 must be"):
            encoder.predict([(QUERY, TEXTS[0]), "text"])

    def test_the_reranking_evaluator_measures_our_order(self, encoder, plain, tmp_path) -> None:
        from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

        best, worst = best_first(plain)[0], best_first(plain)[-1]
        for good, expected in ((best, 1.0), (worst, 0.25)):
            sample = {"query": QUERY, "positive": [TEXTS[good]], "documents": TEXTS}
            evaluator = CrossEncoderRerankingEvaluator([sample], always_rerank_positives=False)
            assert evaluator(encoder, str(tmp_path))["mrr@10"] == expected


class TestLangChain:
    @pytest.fixture
    def documents(self) -> list:
        core = pytest.importorskip("langchain_core.documents", reason=REASON)
        titles = [{"title": title} if title else {} for title in TITLES]
        return [
            core.Document(text, id=f"d{place}", metadata={"place": place, **titles[place]})
            for place, text in enumerate(TEXTS)
        ]

    def test_order_scores_ids_and_metadata_are_kept_and_the_originals_untouched(self, documents, model, titled) -> None:
        from headrank.integrations.langchain import HeadRankCompressor

        kept = HeadRankCompressor(model=model, heads="all", top_n=3).compress_documents(documents, QUERY)
        assert [document.metadata["place"] for document in kept] == best_first(titled)[:3]
        assert [document.id for document in kept] == [f"d{place}" for place in best_first(titled)[:3]]
        assert [document.metadata["relevance_score"] for document in kept] == sorted(titled.tolist(), reverse=True)[:3]
        assert all("relevance_score" not in document.metadata for document in documents)

    def test_async_gives_the_same_and_an_empty_list_stays_empty(self, documents, reranker) -> None:
        from headrank.integrations.langchain import HeadRankCompressor

        compressor = HeadRankCompressor(reranker=reranker, top_n=None, title_key=None)
        assert asyncio.run(compressor.acompress_documents(documents, QUERY)) == compressor.compress_documents(
            documents, QUERY
        )
        assert compressor.compress_documents([], QUERY) == []
        assert "reranker" not in compressor.model_dump()

    def test_it_compresses_behind_a_retriever_in_a_chain(self, documents, reranker) -> None:
        from langchain_core.runnables import RunnableLambda

        from headrank.integrations.langchain import HeadRankCompressor

        compressor = HeadRankCompressor(reranker=reranker, top_n=1)
        chain = RunnableLambda(lambda query: compressor.compress_documents(documents, query)) | (
            lambda found: found[0].id
        )
        assert chain.invoke(QUERY) == compressor.compress_documents(documents, QUERY)[0].id

    def test_a_misspelt_setting_is_refused(self, documents) -> None:
        from headrank.integrations.langchain import HeadRankCompressor

        with pytest.raises(ValueError, match="top_m"):
            HeadRankCompressor(top_m=3)


class TestLlamaIndex:
    @pytest.fixture
    def nodes(self) -> list:
        schema = pytest.importorskip("llama_index.core.schema", reason=REASON)
        metadata = [{"title": title, "page": 7} if title else {"page": 7} for title in TITLES]
        return [
            schema.NodeWithScore(node=schema.TextNode(id_=f"n{place}", text=text, metadata=metadata[place]), score=0.5)
            for place, text in enumerate(TEXTS)
        ]

    def test_nodes_come_best_first_with_our_scores_and_their_identity(self, nodes, model, titled) -> None:
        from headrank.integrations.llama_index import HeadRankPostprocessor

        found = HeadRankPostprocessor(model=model, heads="all", top_n=3).postprocess_nodes(nodes, query_str=QUERY)
        assert [item.node.node_id for item in found] == [f"n{place}" for place in best_first(titled)[:3]]
        assert [item.score for item in found] == sorted(titled.tolist(), reverse=True)[:3]
        assert found[0].node is nodes[best_first(titled)[0]].node
        assert all(item.score == 0.5 for item in nodes)

    def test_async_settings_and_retrieval_scores(self, nodes, reranker, model) -> None:
        from headrank.integrations.llama_index import HeadRankPostprocessor

        postprocessor = HeadRankPostprocessor(reranker=reranker, model=model, heads="all", keep_retrieval_score=True)
        found = asyncio.run(postprocessor.apostprocess_nodes(nodes, query_str=QUERY))
        assert [item.score for item in found] == [
            item.score for item in postprocessor.postprocess_nodes(nodes, query_str=QUERY)
        ]
        assert (
            all(item.node.metadata["retrieval_score"] == 0.5 for item in found)
            and "retrieval_score" not in nodes[0].node.metadata
        )
        again = HeadRankPostprocessor.from_dict(postprocessor.to_dict())
        assert (again.model, again.heads, again.keep_retrieval_score) == (model, "all", True)

    def test_without_a_query_it_says_how_to_give_one(self, nodes, reranker) -> None:
        from headrank.integrations.llama_index import HeadRankPostprocessor

        with pytest.raises(InputError, match="query_str"):
            HeadRankPostprocessor(reranker=reranker).postprocess_nodes(nodes)


class TestHaystack:
    @pytest.fixture
    def documents(self) -> list:
        haystack = pytest.importorskip("haystack", reason=REASON)
        meta = [{"title": title, "place": place} for place, title in enumerate(TITLES)]
        return [haystack.Document(id=f"h{place}", content=text, meta=meta[place]) for place, text in enumerate(TEXTS)]

    def test_a_pipeline_survives_yaml_and_ranks_the_same(self, documents, model, titled) -> None:
        from haystack import Pipeline
        from haystack.components.joiners import DocumentJoiner

        from headrank.integrations.haystack import HeadRankRanker

        pipeline = Pipeline()
        pipeline.add_component("ranker", HeadRankRanker(model, heads="all", top_k=3))
        pipeline.add_component("joiner", DocumentJoiner(sort_by_score=False))
        pipeline.connect("ranker.documents", "joiner.documents")
        read_back = Pipeline.loads(pipeline.dumps(), allowed_modules=["headrank.integrations.haystack"])
        for one in (pipeline, read_back):
            found = one.run({"ranker": {"documents": documents, "query": QUERY}})["joiner"]["documents"]
            assert [document.id for document in found] == [f"h{place}" for place in best_first(titled)[:3]]
            assert [document.score for document in found] == sorted(titled.tolist(), reverse=True)[:3]
            assert [document.meta["place"] for document in found] == best_first(titled)[:3]

    def test_run_async_in_an_async_pipeline_and_top_k_of_the_call(self, documents, model, titled) -> None:
        from headrank.integrations.haystack import HeadRankRanker

        ranker = HeadRankRanker(model, heads="all", top_k=3)
        ranker.warm_up()
        found = asyncio.run(ranker.run_async(query=QUERY, documents=documents, top_k=1))["documents"]
        assert [document.id for document in found] == [f"h{best_first(titled)[0]}"]
        assert ranker.run(QUERY, [])["documents"] == [] and all(document.score is None for document in documents)


class TestRerankers:
    def test_reranker_makes_it_by_name_and_results_keep_ids_and_metadata(self, model, titled) -> None:
        rerankers = pytest.importorskip("rerankers", reason=REASON)
        import headrank.integrations.rerankers  # noqa: F401

        ranker = rerankers.Reranker(model, model_type="HeadRankRanker", heads="all", verbose=0)
        metadata = [{"title": title, "place": place} for place, title in enumerate(TITLES)]
        found = ranker.rank(QUERY, TEXTS, doc_ids=["a", "b", "c", "d"], metadata=metadata)
        assert [result.doc_id for result in found] == ["abcd"[place] for place in best_first(titled)]
        assert [result.rank for result in found] == [1, 2, 3, 4] and found.has_scores
        assert [result.doc_id for result in found.top_k(2)] == ["abcd"[place] for place in best_first(titled)[:2]]
        assert found.get_score_by_docid("a") == float(titled[0])
        assert [result.doc_id for result in asyncio.run(ranker.rank_async(QUERY, TEXTS))] == best_first(
            ranker_scores(ranker)
        )
        assert ranker.rank(QUERY, []).results == []

    def test_one_document_alone_has_a_score(self, model) -> None:
        pytest.importorskip("rerankers", reason=REASON)
        from headrank.integrations.rerankers import HeadRankRanker

        assert isinstance(HeadRankRanker(model, heads="all").score(QUERY, TEXTS[0]), float)


class TestIrMeasures:
    """Also of runs.py, which BEIR, MTEB and ranx share: dictionaries of scores in and out."""

    def test_every_form_of_a_run_gives_scored_documents_with_our_scores(self, reranker, plain) -> None:
        import ir_measures
        from ir_measures import RR, Qrel, ScoredDoc

        from headrank.integrations.ir_measures import rerank_run

        docs = [ScoredDoc("1", doc_id, score) for doc_id, score in RUN["1"].items()]
        # what is used of a data frame; pandas is in 'make test-integrations'
        frame = types.SimpleNamespace(itertuples=lambda: iter(docs))
        forms = [docs, iter(docs), RUN, frame]
        found = [rerank_run(form, {"1": QUERY}, DOCUMENTS, reranker) for form in forms]
        assert found[0] == [ScoredDoc("1", "abcd"[place], float(plain[place])) for place in best_first(plain)]
        assert all(other == found[0] for other in found)
        assert ir_measures.calc_aggregate([RR], [Qrel("1", found[0][0].doc_id, 1)], found[0])[RR] == 1.0

    def test_below_the_depth_the_order_stays_and_the_best_are_those_of_the_scores(self, reranker) -> None:
        from headrank.integrations.ir_measures import rerank_run

        upside_down = {"1": dict(reversed(RUN["1"].items()))}
        rows = rerank_run(upside_down, {"1": QUERY}, DOCUMENTS.__getitem__, reranker, depth=2)
        assert {row.doc_id for row in rows[:2]} == {"a", "b"} and [row.doc_id for row in rows[2:]] == ["c", "d"]
        assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)

    @pytest.mark.parametrize(
        ("run", "queries", "depth", "message"),
        [
            ({"1": {"x": 1.0}}, {"1": QUERY}, None, "candidate 'x', which is not there"),
            ({"2": {"a": 1.0}}, {"1": QUERY}, None, "query '2', which is not there"),
            ({"1": {"a": 1.0}}, {"1": QUERY}, 0, "depth"),
            (["a run"], {"1": QUERY}, None, "no scored document"),
        ],
    )
    def test_what_is_missing_is_named(self, reranker, run, queries, depth, message) -> None:
        from headrank.integrations.ir_measures import rerank_run

        with pytest.raises(InputError, match=message):
            rerank_run(run, queries, DOCUMENTS, reranker, depth=depth)


def ranker_scores(ranker: object) -> np.ndarray:
    return ranker._shared.load().score(QUERY, TEXTS)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("with_sentence_transformers", "sentence_transformers"),
        ("with_langchain", "langchain_core"),
        ("with_llama_index", "llama_index.core"),
        ("with_haystack", "haystack"),
        ("with_rerankers", "rerankers"),
        ("with_ir_measures", "ir_measures"),
    ],
)
def test_the_example_runs(
    name: str, package: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip(package, reason=REASON)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", model, "all"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(r"^[+-][01]\.\d{4}  ", capsys.readouterr().out, re.MULTILINE)


def test_a_missing_package_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import headrank.integrations.langchain"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "pip install 'langchain-core'" in done.stderr.splitlines()[-1]
