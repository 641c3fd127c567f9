"""Rerank what Pyserini finds: `python examples/pyserini_hits.py INDEX MODEL "query"` (needs the extra 'lucene' and Java
21).

INDEX is a folder with a Lucene index or the name of a prebuilt one; MODEL a directory written by `headrank export-hf`.
"""

from __future__ import annotations

import json
import os
import sys

from headrank import HeadRankReranker


def main() -> None:
    """Retrieve forty passages and print the ten best after reranking."""
    index, model, query = sys.argv[1:4]
    os.environ.setdefault("OPENAI_API_KEY", "unused")  # Pyserini asks for it on import
    from pyserini.search.lucene import LuceneSearcher

    searcher = LuceneSearcher(index) if os.path.isdir(index) else LuceneSearcher.from_prebuilt_index(index)
    hits = searcher.search(query, k=40)
    passages = []
    for hit in hits:
        raw = json.loads(searcher.doc(hit.docid).raw())
        passages.append({"title": raw.get("title", ""), "text": raw.get("contents") or raw.get("text", "")})
    for row in HeadRankReranker.from_pretrained(model).rank(query, passages, top_k=10):
        print(f"{row['score']:+.4f}  {hits[row['corpus_id']].docid}  {passages[row['corpus_id']]['text'][:100]}")


if __name__ == "__main__":
    main()
