"""The page at / in a real headless browser, on a real server with a tiny real model: it ranks, shades, picks, and
stays silent.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, chromium_or_skip
from tests.serving_client import DOCUMENTS, PATIENCE, QUERY, Running, late_heads, running_server, tiny_settings

HOSTILE = [
    '<img src=x onerror="document.title=1"> it\'s a flea',
    "</script><script>document.title = 2</script> $(id) `id` \\ floor",
]
KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    return late_heads(tmp_path_factory.mktemp("heads"), room=128, least=0.1)


@pytest.fixture(scope="module")
def served(model: Path, heads: str, embedded_collection: Path) -> Iterator[Running]:
    with running_server(tiny_settings(model, heads=heads, collections=(str(embedded_collection),))) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_or_skip()) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, served: Running) -> Browser:
    open_page(browser, served)
    return browser


def open_page(browser: Browser, served: Running, **how: object) -> None:
    browser.open(served.url + "/", **how)  # type: ignore[arg-type]
    browser.errors.clear()
    wait_for(browser, "document.body.dataset.state === 'ready' || !document.getElementById('problem').hidden")


def wait_for(browser: Browser, condition: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not browser.value(condition):
        assert time.monotonic() < deadline, (condition, text(browser, "#problem"), browser.errors)
        time.sleep(0.05)


def text(browser: Browser, selector: str) -> str:
    return browser.value(f"document.querySelector({json.dumps(selector)}).textContent")


def fill(browser: Browser, query: str, passages: str) -> None:
    for name, value in (("query", query), ("documents", passages)):
        browser.value(f"document.getElementById('{name}').value = {json.dumps(value)}")


def rank(browser: Browser, query: str, passages: str) -> None:
    fill(browser, query, passages)
    browser.value("document.getElementById('status').textContent = ''")
    browser.click("#rank")
    wait_for(browser, "document.getElementById('status').textContent.endsWith('ranked.')")


def rows(browser: Browser) -> list[str]:
    return browser.value("[...document.querySelectorAll('#view .docid')].map((e) => e.textContent)")


def test_pasted_passages_are_ranked_as_the_api_ranks_them_and_shaded(page: Browser, served: Running) -> None:
    rank(page, QUERY, "\n\n".join(DOCUMENTS))
    results = served.ask("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS}).json["results"]
    assert [int(row.split(" ")[0]) - 1 for row in rows(page)] == [result["index"] for result in results]
    for row, result in zip(rows(page), results, strict=True):
        assert float(row.rpartition("score ")[2]) == pytest.approx(result["relevance_score"], rel=1e-3)
    shaded = page.value(
        "[...document.querySelectorAll('.passage i')].filter((e) => e.style.getPropertyValue('--a') > 0).length"
    )
    assert shaded >= 3
    assert "x-total-time" in served.ask("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS}).headers
    assert (
        "round trip" in text(page, "#timing")
        and "model" in text(page, "#timing")
        and "tokens read" in text(page, "#timing")
    )
    assert page.errors == [] and all(url.startswith(served.url) for url in page.requests)


def test_each_head_and_each_query_word_can_be_looked_at(page: Browser) -> None:
    rank(page, QUERY, "\n\n".join(DOCUMENTS))
    assert page.value("document.querySelectorAll('#part option').length") > 30, "all, layers and 32 heads"
    before = page.value("[...document.querySelectorAll('.passage i')].map((e) => e.style.getPropertyValue('--a'))")
    page.value(
        "(() => { const e = document.getElementById('part'); e.value = 'part:5'; e.dispatchEvent(new "
        "Event('change')); })()"
    )
    assert (
        page.value("[...document.querySelectorAll('.passage i')].map((e) => e.style.getPropertyValue('--a'))") != before
    )
    assert "flea" in text(page, "#query-word")


def test_the_curl_line_does_what_the_page_did(page: Browser, served: Running) -> None:
    rank(page, 'it\'s a "flea" $HOME `id`?', "\n\n".join([*HOSTILE, DOCUMENTS[0]]))
    command = shlex.split(text(page, "#curl"))
    assert command[0] == "curl" and json.loads(command[-1])["query"] == 'it\'s a "flea" $HOME `id`?'
    done = subprocess.run(
        ["bash", "-c", text(page, "#curl") + " -s"], capture_output=True, check=True, timeout=PATIENCE
    )
    indices = [result["index"] for result in json.loads(done.stdout)["results"]]
    assert indices == [int(row.split(" ")[0]) - 1 for row in rows(page)]


def test_hostile_text_stays_text(page: Browser) -> None:
    title = page.value("document.title")
    lines = [json.dumps({"text": passage, "title": "<b>t</b>", "id": "<i>d</i>", "grade": 1}) for passage in HOSTILE]
    rank(page, "<script>document.title = 3</script> flea", "\n".join(lines))
    assert page.value("document.title") == title
    assert (
        page.value("document.querySelectorAll('#view script:not([type]), #view img, #view b:not(.legend b)').length")
        == 0
    )
    shown = page.value("[...document.querySelectorAll('.passage')].map((e) => e.textContent).join()")
    assert all(passage in shown for passage in HOSTILE) and "<b>t</b>" in shown
    assert "<i>d</i>" in "".join(rows(page)) and page.errors == []


def test_a_query_of_a_collection_brings_its_passages_and_grades(page: Browser) -> None:
    wait_for(page, "document.querySelectorAll('#offered option').length > 10")
    page.value(
        "(() => { const e = document.getElementById('contains'); e.value = 'fever'; e.dispatchEvent(new "
        "Event('input')); })()"
    )
    wait_for(page, "document.querySelectorAll('#offered option').length === 2")
    page.value(
        "(() => { const e = document.getElementById('offered'); e.selectedIndex = 1; e.dispatchEvent(new "
        "Event('change')); })()"
    )
    wait_for(page, "document.getElementById('documents').value !== ''")
    assert page.value("document.getElementById('query').value") == "how does a fever help the body fight infection"
    page.click("#rank")
    wait_for(page, "document.getElementById('status').textContent.endsWith('ranked.')")
    assert len(rows(page)) == 20 and page.value("document.querySelectorAll('tr.relevant').length") > 0
    assert json.loads(shlex.split(text(page, "#curl"))[-1])["documents"][0].keys() <= {"title", "text"}


def test_the_keyboard_does_everything(page: Browser) -> None:
    fill(page, QUERY, "\n".join(DOCUMENTS))
    page.value("document.getElementById('documents').focus()")
    page.send(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, modifiers=2
    )
    wait_for(page, "document.getElementById('status').textContent.endsWith('ranked.')")
    page.value("document.querySelector('.passage').focus()")
    page.press("ArrowRight")
    assert text(page, "#readout").startswith(text(page, ".passage i"))
    page.press("ArrowDown")
    assert page.value("document.activeElement.closest('tr').dataset.rank") == "2"
    assert all(page.names("combobox")) and all(page.names("textbox")) and page.errors == []


def test_dark_mode_follows_the_system_and_the_button_and_stays(browser: Browser, served: Running) -> None:
    theme = "document.documentElement.dataset.theme"
    open_page(browser, served, dark=True)
    assert browser.value(theme) == "dark"
    browser.click("#theme")
    assert browser.value(theme) == "light"
    rank(browser, QUERY, "\n\n".join(DOCUMENTS))
    rank(browser, QUERY, "\n\n".join(DOCUMENTS))
    assert browser.value(theme) == "light", "a new ranking keeps what was chosen"


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_is_wider_than_the_window(browser: Browser, served: Running, width: int) -> None:
    open_page(browser, served, width=width)
    rank(browser, "x" * 200, "y" * 300 + "\n\n" + DOCUMENTS[0])
    assert browser.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("query", "passages", "words"),
    [
        ("  ", "a", "The query is empty."),
        (QUERY, '{"text": "a"}\n{"text": ', "line 2 of the passages: not JSON"),
        (QUERY, '[{"title": "a"}]', 'passage 1: give a string, or an object with "text"'),
        (QUERY, json.dumps(["a"] * 1001), "documents: 1001 documents; this server ranks at most 1000"),
    ],
)
def test_what_cannot_be_ranked_is_said_in_words(page: Browser, query: str, passages: str, words: str) -> None:
    fill(page, query, passages)
    page.click("#rank")
    wait_for(page, "!document.getElementById('problem').hidden")
    assert words in text(page, "#problem") and page.value("document.getElementById('result').hidden") is True


def test_a_server_with_keys_asks_for_one_and_hides_it_from_the_curl_line(
    browser: Browser, served: Running, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    engine = served.state.engine
    assert engine is not None
    with running_server(tiny_settings(Path("unused"), api_key_file=str(path)), lambda settings: engine) as closed:
        open_page(browser, closed)
        wait_for(browser, "!document.getElementById('key').hidden")
        assert "an API key is needed" in text(browser, "#problem")
        browser.value(
            f"(() => {{ const e = document.getElementById('key'); e.value = '{KEY}'; e.dispatchEvent(new "
            f"Event('change')); }})()"
        )
        wait_for(browser, "document.getElementById('model').textContent.includes('heads')")
        rank(browser, QUERY, "\n\n".join(DOCUMENTS))
        assert "$HEADRANK_API_KEY" in text(browser, "#curl") and KEY not in browser.value("document.body.outerHTML")
        assert closed.ask("/playground/collections").status == 401
