"""The token viewer and the report page in a real headless browser: they render, shade, switch, sort and stay silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrank.reports.grids import Grid
from headrank.reports.page import Page, Paragraph, Picture
from headrank.reports.tables import Column, Row, Table, Value
from headrank.reports.viewer.page import to_html
from tests.browser import Browser, chromium_or_skip
from tests.view_contents import make_view


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_or_skip()) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "view.html"
    path.write_text(to_html(make_view()), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page)
    return browser


def order(browser: Browser) -> list[str]:
    return browser.value("[...document.querySelectorAll('.docid')].map(e => e.textContent)")


def shading(browser: Browser, word: str) -> str:
    return browser.value(
        "getComputedStyle([...document.querySelectorAll('.passage i')].find(e => e.textContent === "
        f"'{word}')).backgroundColor"
    )


def alpha(colour: str) -> float:
    """The opacity of a computed colour: 'rgb(...)' is 1, 'rgba(r, g, b, a)' is a."""
    numbers = colour[colour.index("(") + 1 : -1].replace("/", ",").replace(" ", ",").split(",")
    numbers = [number for number in numbers if number]
    return float(numbers[3]) if len(numbers) == 4 else 1.0


def choose(browser: Browser, control: str, value: str) -> None:
    """Pick an option as a person does: the select changes and says so."""
    browser.value(
        f"(() => {{ const e = document.getElementById('{control}'); e.value = '{value}';"
        " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def test_it_renders_without_a_word_on_the_console_and_without_the_network(opened: Browser) -> None:
    assert order(opened) == ["d1", "d2", "d3<b>"]
    assert opened.value("document.title") == "HeadRank: who was <b>lost</b> at sea & why"
    assert opened.value("document.querySelector('h1').textContent") == "who was <b>lost</b> at sea & why"
    assert opened.value("document.querySelectorAll('.passage script').length") == 0
    assert '<script>document.title = "hacked"</script>' in opened.value(
        "document.querySelectorAll('.passage')[1].textContent"
    )
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("file:")] == []


def test_words_are_shaded_by_their_share(opened: Browser) -> None:
    strongest, weaker, none = (alpha(shading(opened, word)) for word in ("sea", "January", "lost"))
    assert strongest > weaker > none == 0
    assert weaker / strongest == pytest.approx(0.6, abs=0.02)


def test_switching_head_and_layer_changes_shades_ranks_and_strongest_words(opened: Browser) -> None:
    choose(opened, "part", "part:2")  # L5-H0 sees January, not sea; hacked is its strongest word
    assert alpha(shading(opened, "sea")) == 0 < alpha(shading(opened, "January"))
    assert opened.value("[...document.querySelectorAll('tbody .view')].map(e => e.textContent)") == ["2", "1", "3"]
    assert "January 100" in opened.value("document.querySelector('.strongest').textContent")
    choose(opened, "part", "layer:3")
    assert alpha(shading(opened, "sea")) > 0
    choose(opened, "part", "all")
    assert opened.value("[...document.querySelectorAll('tbody .view')].map(e => e.textContent)") == ["1", "2", "3"]
    assert opened.errors == []


def test_scale_over_the_list_keeps_only_the_overall_maximum_dark(opened: Browser) -> None:
    before = alpha(shading(opened, "hacked"))
    choose(opened, "scale", "list")
    assert alpha(shading(opened, "hacked")) < before
    assert alpha(shading(opened, "sea")) == pytest.approx(before, abs=0.02)


def test_columns_sort_by_click_and_say_so(opened: Browser) -> None:
    opened.click("th[data-sort=m0] button")
    assert order(opened) == ["d2", "d3<b>", "d1"]
    assert opened.value("document.querySelector('th[data-sort=m0]').getAttribute('aria-sort')") == "ascending"
    assert opened.value("document.querySelector('th[data-sort=rank]').getAttribute('aria-sort')") == "none"
    assert opened.value("document.getElementById('sort').value") == "m0"
    opened.click("th[data-sort=m1] button")
    assert order(opened) == ["d1", "d3<b>", "d2"]  # ICR has no d2: it goes last
    opened.click("th[data-sort=grade] button")
    assert order(opened) == ["d1", "d2", "d3<b>"]


def test_hovering_shows_the_number(opened: Browser) -> None:
    opened.value("[...document.querySelectorAll('.passage i')].find(e => e.textContent === 'sea').id = 'sea'")
    opened.hover("#sea")
    assert opened.value("document.getElementById('tip').hidden") is False
    assert opened.value("document.getElementById('tip').textContent") == "sea: 1.00 (100 of 100)"
    opened.hover("h1")
    assert opened.value("document.getElementById('tip').hidden") is True


def test_the_keyboard_reaches_every_word_and_passage(opened: Browser) -> None:
    opened.value("document.querySelector('.passage').focus()")
    for _ in range(3):
        opened.press("ArrowRight")
    assert opened.value("document.querySelector('.current').textContent") == "was"
    opened.press("End")
    assert (
        opened.value("document.getElementById('readout').textContent")
        == "January: 0.600 (60 of 100) · all 3 heads, summed"
    )
    opened.press("ArrowDown")
    assert opened.value("document.activeElement.closest('tr').dataset.rank") == "2"
    opened.press("ArrowUp")
    assert opened.value("document.activeElement.closest('tr').dataset.rank") == "1"
    assert opened.errors == []


def test_tab_reaches_the_controls_first(opened: Browser) -> None:
    opened.value("document.activeElement.blur()")
    visited = []
    for _ in range(7):
        opened.press("Tab")
        visited.append(
            opened.value(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
    assert visited[:6] == ["skip", "part", "scale", "sort", "short", "theme"]


def test_a_screen_reader_gets_names_for_everything(opened: Browser) -> None:
    assert any("Passage 1, grade 2, relevant" in name for name in opened.names("group"))
    assert any(name == "not judged" for name in opened.names("image"))
    assert {"Rank", "BM25", "ICR"} <= {name.rstrip(" ▲↕") for name in opened.names("button")}
    assert all(opened.names("combobox"))
    assert len(opened.names("heading")) == 1


def test_dark_mode_follows_the_system_and_the_button(browser: Browser, page: Path) -> None:
    def background() -> int:
        colour = browser.value("getComputedStyle(document.body).backgroundColor")
        return sum(int(number) for number in colour[colour.index("(") + 1 : -1].split(",")[:3])

    browser.open(page, dark=True)
    assert background() < 150
    browser.click("#theme")
    assert background() > 650
    browser.open(page, dark=False)
    assert background() > 650


@pytest.mark.parametrize("width", [1200, 420])
def test_nothing_is_wider_than_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_shading_leaves_text_readable(browser: Browser, page: Path) -> None:
    """WCAG AA (4.5) for the darkest shade on both themes."""
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert browser.value(CONTRAST) >= 4.5


def test_the_report_page_renders_in_both_themes_without_a_word_on_the_console(browser: Browser, tmp_path: Path) -> None:
    row = Row("m<1>", "HeadRank", {("dl19", "nDCG@10"): Value(51.1)})
    report = Page("A report & <more>")
    picture = save_picture(tmp_path / "figure.png")
    blocks = [
        Paragraph("It is <better>.", is_lead=True),
        Grid("Costs", ("Method", "Seconds"), (("ICR", "1.2"),)),
        picture,
    ]
    report.add("Did it get better?", [*blocks, Table("t", "Ours", (Column("dl19", "nDCG@10", "DL19"),), (row,)).grid()])
    report.write(tmp_path)
    browser.errors.clear()
    for dark, width in ((False, 1200), (True, 420)):
        browser.open(tmp_path / "report.html", dark=dark, width=width)
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("document.querySelector('.lead').textContent") == "It is <better>."
        assert browser.value("document.images[0].naturalWidth") > 0
    assert browser.names("image") == ["one bar"]
    assert set(browser.names("table")) == {"Costs", "Ours"}
    assert browser.errors == []


def save_picture(path: Path) -> Picture:
    from headrank.reports.figures import draw_query_changes

    png, _ = draw_query_changes({"1": 0.5}, "nDCG@10", path, "new against old")
    return Picture(png, "one bar", "A caption")


CONTRAST = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const over = (top, under) => {
    const a = top.length > 3 ? top[3] : 1;
    return [0, 1, 2].map((i) => a * top[i] + (1 - a) * under[i]);
  };
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const word = [...document.querySelectorAll('.passage i')].find((e) => e.textContent === 'sea');
  const row = parse(getComputedStyle(word.closest('tr')).backgroundColor);
  const under = over(row, parse(getComputedStyle(document.querySelector('table')).backgroundColor));
  const behind = light(over(parse(getComputedStyle(word).backgroundColor), under));
  const ink = light(parse(getComputedStyle(word).color));
  return (Math.max(behind, ink) + 0.05) / (Math.min(behind, ink) + 0.05);
})()"""
