"""HeadRank as a LlamaIndex postprocessor: `python examples/with_llama_index.py [MODEL] [HEADS]`."""

from __future__ import annotations

import sys

from llama_index.core.schema import NodeWithScore, TextNode

from headrank.integrations.llama_index import HeadRankPostprocessor

QUERY = "why does a violin bow need rosin"
NODES = [
    NodeWithScore(node=TextNode(id_="tuning", text="The four strings of a violin are tuned in fifths."), score=0.8),
    NodeWithScore(
        node=TextNode(id_="rosin", text="Rosin is rubbed on the hair of the bow so that it grips the string."),
        score=0.7,
    ),
    NodeWithScore(node=TextNode(id_="concertos", text="Violin concertos of the romantic period are long."), score=0.6),
]

if __name__ == "__main__":
    model, heads = [*sys.argv[1:], *["embedded", "all"][len(sys.argv) - 1 :]]
    # index.as_query_engine(node_postprocessors=[reranker])
    reranker = HeadRankPostprocessor(model=model, heads=heads, top_n=2)
    for item in reranker.postprocess_nodes(NODES, query_str=QUERY):
        print(f"{item.score:+.4f}  {item.node.node_id}  {item.node.get_content()}")
