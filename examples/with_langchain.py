"""HeadRank behind a LangChain retriever: `python examples/with_langchain.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from langchain_core.documents import Document

from headrank.integrations.langchain import HeadRankCompressor

QUERY = "why does a violin bow need rosin"
DOCUMENTS = [
    Document("The four strings of a violin are tuned in fifths.", metadata={"title": "Tuning", "source": "manual.pdf"}),
    Document("Rosin is rubbed on the hair of the bow so that it grips the string.", metadata={"source": "manual.pdf"}),
    Document("Violin concertos of the romantic period are long.", metadata={"source": "history.pdf"}),
]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    compressor = HeadRankCompressor(model=model, heads=heads, top_n=2)
    # in a chain: await compressor.acompress_documents(...)
    for document in compressor.compress_documents(DOCUMENTS, QUERY):
        print(f"{document.metadata['relevance_score']:+.4f}  {document.metadata['source']}  {document.page_content}")
