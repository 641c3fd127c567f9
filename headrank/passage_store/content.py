"""The name of a passage by its content: the same text is the same passage, an updated one is another."""

from __future__ import annotations

import hashlib


def passage_digest(document: tuple[str, str]) -> bytes:
    """Sixteen bytes that name a (title, text) pair."""
    title, text = document
    return hashlib.blake2b(f"{len(title)}:{title}{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
