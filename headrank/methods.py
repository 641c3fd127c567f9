"""Every method of the paper's tables under one roof: a registry and one function that builds its ranker.

A ranker is anything with ``score_batch(requests) -> list[ListScores]``: scores in the order the documents were given,
higher is better. The attention methods are HeadRankReranker with another HeadSet; RankGPT writes its ranking; a
first-stage ranker keeps the order of its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrank.errors import InputError

if TYPE_CHECKING:
    from headrank.method.heads import HeadSet
    from headrank.reranking.rerank_requests import ListScores
    from headrank.reranking.reranker import DocumentLike


class Ranker(Protocol):
    """What every method offers to commands and evaluations."""

    def score_batch(self, requests: Sequence[tuple[str, Sequence[DocumentLike]]]) -> list[ListScores]:
        """The scores of each (query, documents) list in the order its documents were given."""


@dataclass(frozen=True)
class Method:
    """One row of the paper's tables.

    ``selection`` is the policy of ``headrank select-heads`` that finds the method's heads and ``top_k`` how many its
    own paper keeps; both are None where no head is selected.
    """

    name: str
    title: str
    kind: Literal["first-stage", "generative", "attention"]
    selection: str | None = None
    top_k: int | None = None

    @property
    def needs_heads(self) -> bool:
        """Whether a heads.json has to be given (HeadRank may find one inside an exported model)."""
        return self.selection is not None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("bm25", "BM25", "first-stage"),
        Method("colbertv2", "ColBERTv2", "first-stage"),
        Method("rankgpt", "RankGPT", "generative"),
        Method("icr", "ICR", "attention"),
        Method("core", "CoRe", "attention", "core", 8),
        Method("qr", "QR-R", "attention", "qr", 16),
        Method("niah", "NIAH", "attention", "niah", 8),
        Method("headrank", "HeadRank", "attention", "entropy", 8),
    )
}

# What `headrank select-heads --method` can find heads by; 'qr-ndcg' is a variant without a row of its own.
POLICIES = ("entropy", "core", "qr", "qr-ndcg", "niah")

_SHARED_OPTIONS = frozenset({"device", "dtype", "batch_size"})
_OPTIONS: dict[str, frozenset[str]] = {
    "first-stage": frozenset(),
    "attention": frozenset({"prompt", "calibrate", "max_length", "store", "store_add", "key_cache_bytes"}),
    "generative": frozenset(
        {"api_base", "window", "stride", "prompt", "max_new_tokens", "max_length", "concurrency", "timeout", "retries"}
    ),
}


def find_method(name: str) -> Method:
    """The method of that name; an unknown one is an InputError that lists them."""
    try:
        return METHODS[name]
    except KeyError:
        raise InputError(f"method {name!r} is not one of {', '.join(METHODS)}") from None


def method_name(method: str) -> str:
    """The name for people: 'core' is CoRe, 'headrank+reselected' is HeadRank (reselected); unknown names stay as
    they are.
    """
    base, plus, variant = method.partition("+")
    name = METHODS[base].title if base in METHODS else base
    return f"{name} ({variant})" if plus else name


def method_order(method: str) -> tuple[int, str]:
    """Sort key that gives the paper's row order, variants after their method, unknown methods last."""
    base = method.partition("+")[0]
    known = list(METHODS)
    return (known.index(base) if base in known else len(known), method)


def method_kind(method: str) -> str:
    """first-stage, generative or attention; a method that nobody registered counts as attention."""
    known = METHODS.get(method.partition("+")[0])
    return known.kind if known is not None else "attention"


def build_ranker(
    method: str, model: str | Path | None, heads: HeadSet | str | Path | None = None, **options: Any
) -> Ranker:
    """The ranker of a method on a model.

    ``heads`` is a HeadSet or heads.json for the methods that select heads. Options that are None keep their defaults:
    device, dtype, batch_size for all; prompt, calibrate, max_length, store, store_add, key_cache_bytes for attention;
    api_base, window, stride, prompt (its max_words), max_new_tokens, max_length, concurrency, timeout, retries for
    RankGPT. An option of another kind of method is an error.
    """
    chosen = find_method(method)
    # commands pass every flag they have; calibrate True is the default, and no reason to refuse RankGPT
    given = {
        key: value for key, value in options.items() if value is not None and not (key == "calibrate" and value is True)
    }
    strange = sorted(set(given) - _SHARED_OPTIONS - _OPTIONS[chosen.kind])
    if strange:
        raise InputError(f"method {method!r} does not know the option {strange[0]!r}; leave it out")
    if chosen.kind == "first-stage":
        return FirstStage()
    if model is None:
        raise InputError(f"method {method!r} needs a model; give `model`")
    if chosen.kind == "generative":
        # imported here: BM25 rows must not load torch
        from headrank.generation.rankgpt import build_rankgpt

        return build_rankgpt(model, **given)
    return _attention_ranker(chosen, model, heads, given)


def _attention_ranker(
    method: Method, model: str | Path, heads: HeadSet | str | Path | None, options: dict[str, Any]
) -> Ranker:
    """The one-pass engine with the method's heads; only the policy differs between the attention methods."""
    from headrank.reranking.reranker import HeadRankReranker

    if method.name == "icr":
        return HeadRankReranker.from_pretrained(model, "all", **options)
    if heads is None and method.name != "headrank":
        raise InputError(
            f"method {method.name!r} needs heads: run 'headrank select-heads --method {method.selection} --output "
            "heads.json' "
            "and give it with `heads`"
        )
    return HeadRankReranker.from_pretrained(model, heads, **options)


class FirstStage:
    """A first-stage ranker such as BM25 or ColBERTv2: the lists come in as its run and keep their order."""

    def score_batch(self, requests: Sequence[tuple[str, Sequence[DocumentLike]]]) -> list[ListScores]:
        """Scores that fall with the position: N, N - 1, ..., 1."""
        import numpy as np

        from headrank.reranking.rerank_requests import ListScores

        return [
            ListScores(np.arange(len(documents), 0, -1, dtype=np.float32), num_tokens=0) for _, documents in requests
        ]
