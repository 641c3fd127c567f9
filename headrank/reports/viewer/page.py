"""The view as one self-contained HTML page: complete without JavaScript, switchable with it; or as a part of another
page.

Every text from outside goes through ``html.escape``; numbers travel in a JSON block whose '<' are escaped; a content
security policy admits this page's own script by its hash and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources

import numpy as np

from headrank.reports.viewer.contents import SHADE_FROM, Passage, View

_THEME_BUTTON = '<button type="button" id="theme" aria-pressed="false">Dark</button>'


def to_html(view: View) -> str:
    """The page."""
    script, style = _asset("viewer.js"), _asset("viewer.css")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = html.escape(f"{view.method}: {view.query}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        'content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f'<a class="skip" href="#passages">Skip to the passages</a>{_header(view)}{_controls(view, _THEME_BUTTON)}'
        f"<main>{_passages(view)}</main><script>{script}</script></body></html>\n"
    )


def to_fragment(view: View) -> str:
    """What a page that brings viewer.css, viewer.js and a theme button of its own puts somewhere: legend, switches,
    passages.
    """
    return f"{_legend(view)}{_controls(view)}{_passages(view)}"


def _passages(view: View) -> str:
    """The table, the places where the script writes, and its numbers."""
    rows = "".join(_row(view, passage) for passage in view.passages)
    data = json.dumps(_data(view), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div id="passages"><table><caption>{_caption(view)}</caption>'
        f"<thead><tr>{_heads(view)}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p id="readout" role="status" aria-live="polite"></p><div id="tip" aria-hidden="true" hidden></div>'
        f'<script type="application/json" id="data">{data}</script>'
    )


def _asset(name: str) -> str:
    return resources.files("headrank.reports").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def _header(view: View) -> str:
    note = f"<p>{html.escape(view.note)}</p>" if view.note else ""
    is_late = bool(view.query_words)
    shading = (
        "what they add to the score, over all query words or for one of them" if is_late else "calibrated attention"
    )
    return (
        f"<header><p class=eyebrow>Query {html.escape(view.query_id)}</p><h1>{html.escape(view.query)}</h1>"
        f"<p>{len(view.passages)} passages ranked by <strong>{html.escape(view.method)}</strong> on "
        f"{html.escape(view.model)}. "
        f"Words are shaded by {shading}; hover over a word, or move to it with the keyboard, for its number.</p>{note}"
        f"{_legend(view)}</header>"
    )


def _legend(view: View) -> str:
    dropped = "" if view.query_words else "<span><u>dotted</u>: dropped by the calibration</span>"
    return f'<p class="legend"><span>0 <b></b> the passage\'s maximum</span>{dropped}<span>green: relevant</span></p>'


def _caption(view: View) -> str:
    return f"Passages for “{html.escape(view.query)}”, with the rank each method gives them"


def _controls(view: View, theme_button: str = "") -> str:
    """The switches; hidden until the script runs, because without it they would do nothing."""
    layers = sorted({part.layer for part in view.parts})
    by_layer = {layer: [part.name for part in view.parts if part.layer == layer] for layer in layers}
    is_by_head = any(part.name.startswith("L") for part in view.parts)
    options = f'<option value="all">all {len(view.parts)} {"heads" if is_by_head else "layers"}, summed</option>'
    layer_options = "".join(
        f'<option value="layer:{layer}">layer {layer}{f" ({len(names)} heads)" if len(names) > 1 else ""}</option>'
        for layer, names in by_layer.items()
    )
    options += f'<optgroup label="One layer">{layer_options}</optgroup>'
    if is_by_head:
        head_options = "".join(
            f'<option value="part:{index}">{part.name}</option>' for index, part in enumerate(view.parts)
        )
        options += f'<optgroup label="One head">{head_options}</optgroup>'
    sorts = [
        ("rank", f"{view.method} rank"),
        ("view", "rank by the shaded heads"),
        *((f"m{i}", f"{name} rank") for i, name in enumerate(view.methods)),
    ]
    sort_options = "".join(
        f'<option value="{key}">{html.escape(name)}</option>' for key, name in [*sorts, ("grade", "relevance")]
    )
    return (
        '<form id="controls" hidden aria-label="How to show the passages">'
        f'<label>Shade by <select id="part">{options}</select></label>{_query_words(view)}'
        '<label>Scale <select id="scale"><option value="passage">within each passage</option>'
        '<option value="list">over the whole list</option></select></label>'
        f'<label>Sort by <select id="sort">{sort_options}</select></label>'
        '<label class="check"><input type="checkbox" id="short"> shorten passages</label>'
        f"{theme_button}</form>"
    )


def _query_words(view: View) -> str:
    """Which word of the query the passages are shaded for, where that is known."""
    if not view.query_words:
        return ""
    options = "".join(
        f'<option value="{index}">{html.escape(word)}</option>' for index, word in enumerate(view.query_words)
    )
    return (
        f'<label>Answers to <select id="query-word"><option value="">the whole query</option>{options}</select></label>'
    )


def _heads(view: View) -> str:
    """Column headers that sort; the passage column does not."""
    columns = [
        ("rank", "Rank", "ascending"),
        ("", "Passage", ""),
        ("view", "Shaded", "none"),
        *((f"m{i}", name, "none") for i, name in enumerate(view.methods)),
    ]
    cells = []
    for key, name, direction in [*columns, ("grade", "Rel.", "none")]:
        label = html.escape(name)
        cells.append(
            f'<th scope="col" data-sort="{key}" aria-sort="{direction}"><button type="button">{label}</button></th>'
            if key
            else f'<th scope="col">{label}</th>'
        )
    return "".join(cells)


def _row(view: View, passage: Passage) -> str:
    is_relevant = passage.grade is not None and passage.grade >= view.relevant_from
    sort_keys = {
        "rank": passage.rank,
        "view": passage.rank,
        "grade": -(passage.grade if passage.grade is not None else -1),
    }
    sort_keys |= {f"m{i}": passage.ranks[name] or 10**6 for i, name in enumerate(view.methods)}
    data = "".join(f' data-{key}="{value}"' for key, value in sort_keys.items())
    ranks = "".join(
        f'<td data-label="{html.escape(name)}">{passage.ranks[name] if passage.ranks[name] is not None else "–"}</td>'
        for name in view.methods
    )
    words = (
        "not judged"
        if passage.grade is None
        else f"grade {passage.grade}, {'relevant' if is_relevant else 'not relevant'}"
    )
    mark = "–" if passage.grade is None else f"{'✓' if is_relevant else '✗'} {passage.grade}"
    strongest = _strongest(passage)
    return (
        f'<tr{" class=relevant" if is_relevant else ""}{data}><th scope="row">{passage.rank}</th>'
        f'<td class="text"><p class="docid">{html.escape(passage.doc_id)}</p>'
        f'<p class="passage" tabindex="0" role="group" aria-label="Passage {passage.rank}, {words}. Arrow keys move '
        'over its words.">'
        f"{_words(passage)}</p>"
        f'<p class="strongest">Strongest: <span>{strongest}</span></p>{_matches(view, passage)}</td>'
        f'<td class="view" data-label="Shaded">{passage.rank}</td>{ranks}'
        f'<td data-label="Rel."><span role="img" aria-label="{words}">{mark}</span></td></tr>'
    )


def _words(passage: Passage) -> str:
    """The whole text, words in spans with their shade; what lies between words is kept as it is."""
    pieces, previous, in_title = [], 0, passage.title_length > 0
    pieces.append("<strong>" if in_title else "")
    for (begin, end), value, is_dropped in zip(passage.words, passage.shades(), passage.is_dropped_W, strict=True):
        if in_title and begin >= passage.title_length:
            pieces.append(f"{html.escape(passage.text[previous : passage.title_length])}</strong>")
            previous, in_title = passage.title_length, False
        style = f' style="--a:{value:.2f}"' if value >= SHADE_FROM else ""
        kind = ' class="dropped"' if is_dropped else ""
        pieces.append(
            f"{html.escape(passage.text[previous:begin])}<i{style}{kind}>{html.escape(passage.text[begin:end])}</i>"
        )
        previous = end
    pieces.append(html.escape(passage.text[previous:]) + ("</strong>" if in_title else ""))
    return "".join(pieces)


def _matches(view: View, passage: Passage) -> str:
    """For each query word the passage word that answered it best, if any did."""
    if passage.answers_QW is None or not passage.words:
        return ""
    found = []
    for word, values_W in zip(view.query_words, passage.answers_QW, strict=True):
        best = int(values_W.argmax())
        if values_W[best] > 0:
            found.append(f"{word} → {passage.text[slice(*passage.words[best])]} {values_W[best]:+.2f}")
    return f'<p class="matches">{html.escape("; ".join(found) or "no word of the query was answered")}</p>'


def _strongest(passage: Passage, count: int = 5) -> str:
    shades = passage.shades()
    best = [index for index in np.argsort(-shades, kind="stable")[:count] if shades[index] >= SHADE_FROM]
    return html.escape(
        ", ".join(f"{passage.text[slice(*passage.words[index])]} {round(100 * shades[index])}" for index in best)
        or "none"
    )


def _data(view: View) -> dict:
    """What the script needs: for each row in page order, values by part and word, and scores by part."""
    return {
        "parts": [{"layer": part.layer, "name": part.name} for part in view.parts],
        "shadeFrom": SHADE_FROM,
        "rows": [
            {"values": _rounded(passage.values_KW), "scores": _rounded(passage.scores_K, 6)}
            | ({} if passage.answers_QW is None else {"answers": _rounded(passage.answers_QW)})
            for passage in view.passages
        ],
    }


def _rounded(values: np.ndarray, digits: int = 3) -> list:
    """Nested lists with a few significant digits: the page stays small and the shades stay true."""
    if values.ndim > 1:
        return [_rounded(row, digits) for row in values]
    return [float(f"{value:.{digits}g}") for value in values]
