"""A view made by code, with everything that may go wrong in it: markup in texts, no title, ties, unjudged and
missing documents.
"""

from __future__ import annotations

import numpy as np

from headrank.formats import Document
from headrank.reports.viewer.contents import View, build_view
from headrank.reranking.explain import Explanation, TokenScores

HEADS = ((3, 1), (3, 2), (5, 0))
DOCUMENTS = (
    Document("d1", "Jim Gray", "was lost at sea in January"),
    Document("d2", "", '<script>document.title = "hacked"</script> & "quotes" \\ 100% $x_1$ #1 ~ {y}'),
    Document("d3<b>", "Sea level", "the sea rises"),
)
# values of (word, head): everything else is zero
BUMPS = {
    ("d1", "sea"): (0.9, 0.1, 0.0),
    ("d1", "January"): (0.1, 0.3, 0.2),
    ("d2", "hacked"): (0.05, 0.0, 0.4),
    ("d3<b>", "rises"): (-0.2, 0.0, 0.1),
}


def tokens_of(text: str) -> np.ndarray:
    """Pieces of at most three characters, spaces leading their word, as a byte-pair tokenizer would give."""
    offsets, start = [], 0
    for place in range(1, len(text) + 1):
        if place == len(text) or text[place].isspace() or place - start == 3:
            offsets.append((start, place))
            start = place
    return np.array(offsets)


def detailed_scores() -> Explanation:
    """Scores of the three documents whose word values are BUMPS."""
    tokens, per_head = [], []
    for document in DOCUMENTS:
        text = f"{document.title}\n{document.text}" if document.title else document.text
        offsets = tokens_of(text)
        values = np.zeros((len(HEADS), len(offsets)))
        for (doc_id, word), bump in BUMPS.items():
            if doc_id == document.doc_id:
                begin = text.rindex(word)
                owners = [
                    index
                    for index, (first, last) in enumerate(offsets)
                    if first >= begin - 1 and last <= begin + len(word)
                ]
                values[:, owners] += np.array(bump)[:, None] / len(owners)
        is_kept = np.ones(len(offsets), dtype=bool)
        if document.doc_id == "d3<b>":
            is_kept[-2:] = False
        tokens.append(TokenScores(text, offsets, values.astype(np.float32), is_kept))
        per_head.append((values * is_kept).sum(axis=1))
    per_head_KN = np.array(per_head).T.astype(np.float32)
    return Explanation(per_head_KN.sum(axis=0), per_head_KN, HEADS, tuple(tokens), 90, False)


def make_view(**changes: object) -> View:
    """The view of a query with markup in it; d1 first, then d2, then d3."""
    values: dict = {
        "query_id": "q<1>",
        "query": "who was <b>lost</b> at sea & why",
        "model": "tiny",
        "method": "HeadRank",
        "ranks": {"BM25": {"d1": 3, "d2": 1, "d3<b>": 2}, "ICR": {"d1": 1, "d3<b>": 2}},
        "grades": {"d1": 2, "d2": 0},
        "title_lengths": [len(document.title) for document in DOCUMENTS],
    }
    return build_view(detailed_scores(), DOCUMENTS, **(values | changes))
