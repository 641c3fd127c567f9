"""One small file per ecosystem: each is imported by its own name, and only then needs the package it adapts to.

``from headrank.integrations.langchain import HeadRankCompressor`` and so on; docs/integrations.md has the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Imports of an ecosystem's package stand inside; when it is not installed the message says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name!r} is not installed"
        raise ModuleNotFoundError(
            f"{missing}; run pip install '{package}'", name=error.name, path=error.path
        ) from error
