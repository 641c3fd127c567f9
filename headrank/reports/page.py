"""A report page as a list of sections, written as one Markdown file and one self-contained HTML file (pictures
inside).
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from headrank.formats import atomic_write
from headrank.reports.grids import Grid
from headrank.reports.table_text import to_html, to_markdown

PIXELS_PER_DOT = 0.55  # figures are drawn at 200 dots per inch and shown at 110 pixels an inch, all at the same scale


@dataclass(frozen=True)
class Paragraph:
    """Plain words; ``is_lead`` makes them the first thing a reader sees."""

    text: str
    is_lead: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of plain sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """A figure on disk (its PNG), what it shows in words, and a caption."""

    path: Path
    alt: str
    caption: str


Block = Paragraph | Bullets | Grid | Picture


@dataclass
class Page:
    """Title and sections in reading order."""

    title: str
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)

    def add(self, title: str, blocks: Sequence[Block]) -> None:
        """Append a section; one without blocks is left out."""
        if blocks:
            self.sections.append((title, list(blocks)))

    def write(self, folder: str | os.PathLike[str], name: str = "report") -> list[Path]:
        """Write NAME.md and NAME.html into ``folder``; pictures are linked from the Markdown and embedded in the
        HTML.
        """
        root = Path(folder)
        outputs = {root / f"{name}.md": self.to_markdown(root), root / f"{name}.html": self.to_html()}
        for path, text in outputs.items():
            with atomic_write(path) as stream:
                stream.write(text)
        return list(outputs)

    def to_markdown(self, root: Path) -> str:
        """GitHub Markdown; picture paths are relative to ``root``."""
        parts = [f"# {self.title}"]
        for title, blocks in self.sections:
            parts.append(f"## {title}")
            parts += [_markdown(block, root) for block in blocks]
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """One file, no network, readable in light and dark and on a phone."""
        style = resources.files("headrank.reports").joinpath("assets/page.css").read_text(encoding="utf-8")
        links = "".join(
            f'<li><a href="#s{number}">{html.escape(title)}</a></li>' for number, (title, _) in enumerate(self.sections)
        )
        body = "".join(
            f'<section aria-labelledby="s{number}"><h2 '
            f'id="s{number}">{html.escape(title)}</h2>{"".join(map(_html, blocks))}</section>'
            for number, (title, blocks) in enumerate(self.sections)
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
            'content="light dark">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            'img-src data:">'
            f"<title>{html.escape(self.title)}</title><style>{style}</style></head>"
            f'<body><a class="skip" href="#main">Skip to the report</a><header><h1>{html.escape(self.title)}</h1>'
            f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main id="main">{body}</main></body></html>\n'
        )


def _markdown(block: Block, root: Path) -> str:
    if isinstance(block, Paragraph):
        return f"**{block.text}**" if block.is_lead else block.text
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Picture):
        path = Path(os.path.relpath(block.path, root)).as_posix()
        return f"![{block.alt}]({path})\n\n*{block.caption}*"
    return to_markdown(block).rstrip("\n")


def _html(block: Block) -> str:
    if isinstance(block, Paragraph):
        return f"<p{' class=lead' if block.is_lead else ''}>{html.escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Picture):
        data = block.path.read_bytes()
        width = round(int.from_bytes(data[16:20], "big") * PIXELS_PER_DOT)  # the PNG header's own width
        source = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
        return (
            f'<figure><img alt="{html.escape(block.alt)}" width="{width}" src="{source}">'
            f"<figcaption>{html.escape(block.caption)}</figcaption></figure>"
        )
    return to_html(block)
