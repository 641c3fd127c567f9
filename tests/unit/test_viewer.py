"""The token viewer without a browser: words, shades, ranks, escaping, LaTeX."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.reports.viewer.contents import MAX_HEADS, build_view, shade
from headrank.reports.viewer.latex import to_latex
from headrank.reports.viewer.page import to_html
from headrank.reports.viewer.words import split_words, values_of_words
from headrank.reranking.explain import Explanation, TokenScores
from tests.view_contents import BUMPS, DOCUMENTS, HEADS, detailed_scores, make_view, tokens_of


def words(text: str) -> list[str]:
    return [text[begin:end] for begin, end in split_words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("second son of", ["second", "son", "of"]),
        ("Leofric's co-author (1378).", ["Leofric's", "co-author", "(", "1378", ")."]),
        ("U.S. $5.2 billion", ["U.S", ".", "$", "5.2", "billion"]),
        ("東京は naïve", ["東", "京", "は", "naïve"]),
        ("a_b  \n c", ["a_b", "c"]),
        ("हिन्दी भाषा, cafe\u0301s", ["हिन्दी", "भाषा", ",", "cafe\u0301s"]),
        ("กินข้าว", ["กิ", "น", "ข้", "า", "ว"]),
        ("", []),
    ],
)
def test_words_are_what_people_read(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(max_size=80))
def test_every_visible_character_is_in_exactly_one_word(text: str) -> None:
    owned = [place for begin, end in split_words(text) for place in range(begin, end)]
    assert owned == sorted(set(owned))
    assert {place for place, char in enumerate(text) if not char.isspace()} <= set(owned)


@given(st.text(min_size=1, max_size=60), st.integers(0, 2**32 - 1))
def test_sharing_values_among_words_keeps_the_sum(text: str, seed: int) -> None:
    offsets = tokens_of(text)
    values = np.random.default_rng(seed).normal(size=(2, len(offsets)))
    spans, shared = values_of_words(text, offsets, values)
    if spans:
        assert shared.sum(axis=1) == pytest.approx(values.sum(axis=1), abs=1e-9)
    else:
        assert shared.shape == (2, 0)


def test_a_word_gets_the_sum_of_its_pieces_and_a_token_over_two_words_is_shared() -> None:
    spans, values = values_of_words(
        "unlike a.b", np.array([(0, 2), (2, 6), (6, 9), (9, 10)]), np.array([[1.0, 2.0, 3.0, 4.0]])
    )
    assert [("unlike a.b"[begin:end]) for begin, end in spans] == ["unlike", "a.b"]
    assert values.tolist() == [[3.0, 7.0]]
    _, values = values_of_words("ab cd", np.array([(0, 5)]), np.array([[1.0]]))
    assert values.tolist() == [[0.5, 0.5]]


def test_shades_are_fractions_of_the_largest_and_never_negative() -> None:
    assert shade(np.array([0.2, -0.1, 0.4])).tolist() == [0.5, 0.0, 1.0]
    assert shade(np.array([-1.0, 0.0])).tolist() == [0.0, 0.0]


def test_passages_come_ranked_with_their_words_ranks_and_grades() -> None:
    view = make_view()
    first, second, third = view.passages
    assert [passage.doc_id for passage in view.passages] == ["d1", "d2", "d3<b>"]
    assert (first.ranks, first.grade, second.ranks["ICR"], third.grade) == ({"BM25": 3, "ICR": 1}, 2, None, None)
    shaded = {
        first.text[slice(*span)]: value for span, value in zip(first.words, first.shades(), strict=True) if value > 0
    }
    assert shaded == pytest.approx({"sea": 1.0, "January": 0.6})
    assert first.score == pytest.approx(sum(BUMPS["d1", "sea"]) + sum(BUMPS["d1", "January"]))
    assert [
        third.text[slice(*span)] for span, is_dropped in zip(third.words, third.is_dropped_W, strict=True) if is_dropped
    ] == ["rises"]


def test_equal_scores_keep_the_given_order() -> None:
    scores = detailed_scores()
    flat = Explanation(np.zeros(3), scores.per_head, scores.heads, scores.tokens, 9, False)
    view = build_view(
        flat, DOCUMENTS, query_id="q", query="x", model="m", method="h", ranks={}, grades=None, title_lengths=[0, 0, 0]
    )
    assert [passage.doc_id for passage in view.passages] == ["d1", "d2", "d3<b>"]


def test_a_large_head_set_is_shown_by_layer() -> None:
    heads = tuple((layer, head) for layer in range(10) for head in range(9))
    assert len(heads) > MAX_HEADS
    tokens = TokenScores("a b", np.array([(0, 1), (1, 3)]), np.ones((90, 2), np.float32), np.ones(2, bool))
    scores = Explanation(np.array([180.0]), np.full((90, 1), 2.0), heads, (tokens,), 2, False)
    view = build_view(
        scores,
        DOCUMENTS[:1],
        query_id="q",
        query="x",
        model="m",
        method="ICR",
        ranks={},
        grades=None,
        title_lengths=[0],
    )
    assert [part.name for part in view.parts] == [f"layer {layer}" for layer in range(10)]
    assert view.passages[0].values_KW.tolist() == [[9.0, 9.0]] * 10
    assert view.passages[0].score == 180.0


class Collector(HTMLParser):
    """Tags and the text a browser would show, script and style left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.shown: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.shown.append(data)


def test_markup_in_texts_is_shown_as_text() -> None:
    parser = Collector()
    parser.feed(to_html(make_view()))
    shown = "".join(parser.shown)
    assert '<script>document.title = "hacked"</script>' in shown
    assert "who was <b>lost</b> at sea & why" in shown
    assert "d3<b>" in shown
    assert "q<1>" in shown
    assert parser.tags.count("script") == 2
    assert "b" not in [tag for tag in parser.tags if tag == "b"][1:]  # the legend's own bar is the only <b>


def test_the_page_asks_the_network_for_nothing() -> None:
    page = to_html(make_view())
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src &#x27;none&#x27;" in page


def test_the_numbers_in_the_page_are_those_of_the_view() -> None:
    page = to_html(make_view())
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert [part["name"] for part in data["parts"]] == ["L3-H1", "L3-H2", "L5-H0"]
    first = make_view().passages[0]
    assert np.array(data["rows"][0]["values"]) == pytest.approx(first.values_KW, rel=5e-3)
    assert sum(data["rows"][0]["scores"]) == pytest.approx(first.score, rel=1e-4)


def test_a_closing_tag_inside_the_data_cannot_end_it() -> None:
    view = make_view(method="</script><script>alert(1)</script>")
    assert to_html(view).count("<script") == 2


def test_latex_escapes_text_and_shades_as_the_paper_does() -> None:
    text = to_latex(make_view())
    assert r"\hlc[violet!100!white]{sea}" in text
    assert r"\hlc[violet!60!white]{January}" in text
    assert r"\textbf{Jim Gray} was lost at" in text
    assert r"100\% \$x\_1\$ \#1 \textasciitilde{} \{y\}" in text
    assert r"\textless{}script\textgreater{}" in text
    assert "& 3 & 1 & \\ding{51} \\\\" in text
    assert "& 1 & -- & -- \\\\" in text
    body = re.sub(r"\\[{}]", "", text)
    assert body.count("{") == body.count("}")


def test_latex_cuts_long_passages_and_lists() -> None:
    text = to_latex(make_view(), top=1, max_words=3)
    assert r"\ldots" in text
    assert "d2" not in text
    assert text.count(r"\#") == 1


def test_head_count_matches_the_scores() -> None:
    assert detailed_scores().per_head.shape == (len(HEADS), len(DOCUMENTS))
