"""MTEB 2: a search model that reranks whole lists, and a reranking task from a collection folder.

MTEB cuts the pairs of a CrossEncoder into batches; ``search`` gets the candidates of a query together, and so does
HeadRank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.integrations import needs
from headrank.integrations.runs import RunScores, rerank_scores, shared_reranker
from headrank.integrations.shared_reranker import document_from
from headrank.reranking.reranker import DocumentLike, HeadRankReranker

with needs("mteb"):
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta


class HeadRankSearch:
    """What ``mteb.evaluate`` takes as a model, for tasks that bring candidates (``top_ranked``)."""

    def __init__(
        self,
        model: str | HeadRankReranker = "embedded",
        *,
        heads: str | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        """The arguments of ``HeadRankReranker.from_pretrained``; ``name`` ("org/name") is what results are filed
        under.
        """
        self.shared = shared_reranker(model, heads, **settings)
        given = model if isinstance(model, str) else model.reader.name
        self._name = name or (
            given if given.count("/") == 1 and not Path(given).exists() else f"headrank/{Path(given).name}"
        )
        self._documents: dict[str, DocumentLike] = {}

    @property
    def mteb_model_meta(self) -> Any:
        """The name for MTEB's results; facts that are not known here stay open."""
        return ModelMeta.create_empty(
            {"name": self._name, "revision": "local", "model_type": ["cross-encoder"], "framework": ["PyTorch"]}
        )

    def index(self, corpus: Any, **ignored: Any) -> None:
        """Remember the texts; nothing is computed before the lists are known."""
        del ignored
        self._documents = {row["id"]: document_from(row.get("text") or row.get("body") or "", row) for row in corpus}

    def search(self, queries: Any, *, top_k: int, top_ranked: Any = None, **ignored: Any) -> RunScores:
        """Scores of every query's candidates, at most ``top_k`` of them."""
        del ignored
        if top_ranked is None:
            raise InputError(
                "HeadRank reranks, and this task brings no candidates; choose a reranking task, or give it top_ranked"
            )
        texts = {row["id"]: row["text"] for row in queries}
        candidates = {
            query_id: {doc_id: -float(place) for place, doc_id in enumerate(top_ranked[query_id])}
            for query_id in texts
            if query_id in top_ranked
        }
        found = rerank_scores(self.shared, candidates, texts, self._documents)
        return {query_id: dict(list(found.get(query_id, {}).items())[:top_k]) for query_id in texts}


def reranking_task(folder: str | Path, *, name: str | None = None, depth: int = 40) -> Any:
    """A MTEB task of a collection folder (queries, corpus, qrels, run): rerank the ``depth`` first candidates of the
    run; NDCG@10.
    """
    collection = Collection.open(str(folder))
    run, qrels, queries = collection.run(), collection.qrels(), collection.queries()
    chosen = [
        query_id
        for query_id in queries
        if run.get(query_id) and any(grade > 0 for grade in qrels.get(query_id, {}).values())
    ]
    if not chosen:
        raise InputError(f"{folder}: no query has both candidates and a relevant document")
    top_ranked = {query_id: [row.doc_id for row in run[query_id][:depth]] for query_id in chosen}
    texts = collection.documents({doc_id for ids in top_ranked.values() for doc_id in ids})
    data = {
        "corpus": Dataset.from_list(
            [{"id": key, "title": item.title, "text": item.text} for key, item in texts.items()]
        ),
        "queries": Dataset.from_list([{"id": query_id, "text": queries[query_id]} for query_id in chosen]),
        "relevant_docs": {query_id: dict(qrels[query_id]) for query_id in chosen},
        "top_ranked": top_ranked,
    }
    return _task_class(name or Path(folder).resolve().name, data)()


def _task_class(name: str, data: dict[str, Any]) -> type:
    class CollectionReranking(AbsTaskRetrieval):
        """A task whose data are here already."""

        metadata = TaskMetadata(
            name=name,
            description=f"Reranking of the candidates in the collection {name}.",
            type="Reranking",
            dataset={"path": f"local/{name}", "revision": "local"},
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            eval_splits=["test"],
        )

        def load_data(self, **ignored: Any) -> None:
            """Nothing is fetched."""
            del ignored
            self.dataset = {"default": {"test": dict(data)}}
            self.data_loaded = True

    return CollectionReranking
