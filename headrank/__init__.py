"""HeadRank: decoding-free passage reranking from the attention of preference-trained heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["HeadRankReranker", "HeadSet", "InputError", "PromptTemplate", "__version__"]

if TYPE_CHECKING:
    from headrank.errors import InputError
    from headrank.method.heads import HeadSet
    from headrank.method.prompt import PromptTemplate
    from headrank.reranking.reranker import HeadRankReranker

_HOMES = {
    "HeadRankReranker": "headrank.reranking.reranker",
    "HeadSet": "headrank.method.heads",
    "InputError": "headrank.errors",
    "PromptTemplate": "headrank.method.prompt",
}


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that ``headrank --help`` never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrank' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
