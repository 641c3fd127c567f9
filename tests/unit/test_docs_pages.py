"""The pages in docs/: short where promised, listed in the index, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = (page.parent / link).resolve() if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}" if anchor else link)
    assert not broken


def test_the_index_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} == linked


def test_the_readme_and_the_results_page_stay_short() -> None:
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in ("README.md", "docs/results.md")}
    assert lines["README.md"] <= 110 and lines["docs/results.md"] <= 250


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_layout_has_one_name(page: Path) -> None:
    """The parallel and the sequential layout; other names for them were confusing."""
    found = re.search(r"side[ -]by[ -]side|one after another", page.read_text(encoding="utf-8"), re.IGNORECASE)
    assert found is None, f"{page.name}: {found and found[0]!r}"


def test_the_walks_of_the_tour_are_short() -> None:
    """A newcomer can follow a request, a cell and a pair; where a walk grows, the code has."""
    sections = re.split(r"^## ", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    files = {text.splitlines()[0]: set(re.findall(r"\]\((\.\./[\w./]+\.py)\)", text)) for text in sections}
    most = {  # one file more than steps where a step names an alternative: the other engine, the store, the YAML reader
        "A rerank request": 9,
        "A request in the late layout": 9,
        "A benchmark cell": 13,
        "A training pair": 25,
    }
    assert files.keys() == most.keys()
    assert not {walk: len(found) for walk, found in files.items() if len(found) > most[walk]}
