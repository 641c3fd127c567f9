"""BM25 and HeadRank in a Haystack pipeline: `python examples/with_haystack.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from headrank.integrations.haystack import HeadRankRanker

QUERY = "why does a violin bow need rosin"
TEXTS = [
    "The four strings of a violin are tuned in fifths.",
    "Rosin is rubbed on the hair of the bow so that it grips the string.",
    "Violin concertos of the romantic period are long.",
]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=text) for text in TEXTS])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store))
    pipeline.add_component("ranker", HeadRankRanker(model, heads=heads, top_k=2))
    pipeline.connect("retriever.documents", "ranker.documents")
    for document in pipeline.run({"retriever": {"query": QUERY}, "ranker": {"query": QUERY}})["ranker"]["documents"]:
        print(f"{document.score:+.4f}  {document.content}")
