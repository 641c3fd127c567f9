"""HeadRankReranker: rank passages by the attention of a few heads, on any Hugging Face decoder.

One interface, two ways of reading, chosen by the heads' prompt: lists that stand in one prompt (prompt_reranker.py: the
paper's score, and every other method that reads attention) and passages that stand alone (late_reranker.py). ``rank``
and ``rank_batch`` order passages, ``score`` gives their numbers, ``explain`` where they come from.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrank.errors import InputError
from headrank.method.heads import HeadSet, head_name
from headrank.method.prompt import PromptTemplate
from headrank.model_config import model_size
from headrank.reranking import shipped_readouts
from headrank.reranking.exported_model import read_headrank_json
from headrank.reranking.key_source import DEFAULT_BYTES, KeySource
from headrank.reranking.model_sources import EMBEDDED
from headrank.reranking.reader import AttentionReader
from headrank.reranking.rerank_requests import ListScores

if TYPE_CHECKING:
    from headrank.reranking.explain import Explanation

_log = logging.getLogger(__name__)
DocumentLike = str | Mapping[str, str]
ListOfPairs = list[tuple[str, list[tuple[str, str]]]]  # (query, (title, text) pairs)


class HeadRankReranker(ABC):
    """Scores lists of passages; made with ``from_pretrained``, or ``from_reader`` where a model is loaded already."""

    def __init__(self, reader: AttentionReader, heads: HeadSet, batch_size: int) -> None:
        """``batch_size`` is the number of lists that are scored at a time."""
        heads.check_fits(reader.num_layers, reader.num_heads, reader.name)
        self.reader, self.heads, self.batch_size = reader, heads, batch_size
        self.by_layer = heads.by_layer()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        heads: HeadSet | str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompt: PromptTemplate | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> HeadRankReranker:
        """Load a model ('embedded', a directory, a hub name) with its heads.

        ``heads`` is a HeadSet, a heads.json, "all" (every head, as ICR), or None for those in the model's
        headrank.json. The embedded model brings "fast" (its default) and "full", which are read with the trained
        adapter that comes with the package, and "untrained-full" and "untrained-fast" without it; any other heads are
        read on the embedded model as it is. The prompt is the heads' own unless one is given. Layers above the deepest
        head are not loaded. Other options are those of ``from_reader``.
        """
        model = shipped_readouts.model_to_read(model, heads)
        chosen = choose_heads(model, heads, prompt)
        chosen.check_fits(*model_size(model), str(model))
        _check_store(options.get("store"), chosen)  # before seconds are spent on loading
        chosen = chosen if prompt is None else dataclasses.replace(chosen, prompt=prompt)
        reader = AttentionReader.load(
            model, prompt=chosen.prompt, last_layer=chosen.l_max, device=device, dtype=dtype, max_length=max_length
        )
        return cls.from_reader(reader, chosen, **options)

    @classmethod
    def from_reader(
        cls,
        reader: AttentionReader,
        heads: HeadSet,
        *,
        calibrate: bool = True,
        batch_size: int | None = None,
        key_source: KeySource | None = None,
        key_cache_bytes: int = DEFAULT_BYTES,
        store: str | Path | None = None,
        store_add: bool = False,
    ) -> HeadRankReranker:
        """A reranker for these heads on a loaded model: late if their prompt is, else by lists that stand in one
        prompt.

        ``calibrate`` False ranks by raw masses; log masses are never calibrated. ``batch_size`` is lists at a time
        (default: 1, or 32 in the late layout, whose passages fill batches of their own). ``key_source`` and
        ``key_cache_bytes`` belong to the late layout: where kept keys come from, and how many bytes of recent ones are
        remembered. ``store`` is the folder of a passage store that 'headrank index' made; ``store_add`` adds the
        passages that it lacks.
        """
        if store_add and store is None:
            raise InputError("`store_add` needs a store to add to; give `store`")
        if store is not None and heads.prompt.is_late:
            from headrank.passage_store.source import StoredPassages

            key_source = StoredPassages(store, add=store_add)
        if heads.prompt.is_late:
            from headrank.reranking.late_reranker import LateReranker

            return LateReranker(
                reader, heads, batch_size=batch_size, key_source=key_source, key_cache_bytes=key_cache_bytes
            )
        _check_store(store if key_source is None else key_source, heads)
        from headrank.reranking.prompt_reranker import PromptReranker

        return PromptReranker(reader, heads, calibrate=calibrate, batch_size=batch_size)

    @property
    def layers_used(self) -> int:
        """Layers computed for a query: l_max + 1."""
        return self.heads.l_max + 1

    def rank(
        self, query: str, documents: Sequence[DocumentLike], top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Rank ``documents`` for ``query``: [{"corpus_id", "score"(, "text")}], best first, as CrossEncoder.rank
        does.
        """
        return self.rank_batch([(query, documents)], top_k=top_k, return_documents=return_documents)[0]

    def rank_batch(
        self,
        requests: Sequence[tuple[str, Sequence[DocumentLike]]],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Rank the documents of many queries."""
        if top_k is not None and top_k < 1:
            raise InputError(f"`top_k` {top_k} must be at least 1")
        ranked = []
        for (_, documents), result in zip(requests, self.score_batch(requests, batch_size=batch_size), strict=True):
            order = sorted(range(len(documents)), key=lambda index: (-result.scores[index], index))[:top_k]
            rows: list[dict[str, Any]] = [{"corpus_id": index, "score": float(result.scores[index])} for index in order]
            if return_documents:
                rows = [row | {"text": documents[row["corpus_id"]]} for row in rows]
            ranked.append(rows)
        return ranked

    def score(self, query: str, documents: Sequence[DocumentLike]) -> np.ndarray:
        """The scores float32 [N] of one list, in the order its documents were given; higher is more relevant."""
        return self.score_batch([(query, documents)])[0].scores

    @abstractmethod
    def score_batch(
        self, requests: Sequence[tuple[str, Sequence[DocumentLike]]], *, batch_size: int | None = None
    ) -> list[ListScores]:
        """The scores of each list in the order its documents were given, with what reading it took."""

    @abstractmethod
    def explain(self, query: str, documents: Sequence[DocumentLike]) -> Explanation:
        """Per-document, per-head and per-token numbers of one list, for analyses and the token viewer."""

    def __repr__(self) -> str:
        names = ", ".join(head_name(head) for head in self.heads.heads[:8])
        depth = f"layers {self.layers_used}/{self.reader.num_layers}"
        return f"{type(self).__name__}({self.reader.name!r}, {len(self.heads.heads)} heads: {names}, {depth})"


def _check_store(store: object, heads: HeadSet) -> None:
    """Refuse keys for heads that have none, and a folder that is no store."""
    if store is None:
        return
    if not heads.prompt.is_late:
        raise InputError(
            "keys of passages are kept in the late layout only, and these heads read the "
            f"{heads.prompt.document_layout} one"
        )
    if isinstance(store, str | Path):
        from headrank.passage_store.header import StoreHeader

        StoreHeader.read(store)


def choose_heads(
    model: str | Path, heads: HeadSet | str | Path | None, prompt: PromptTemplate | None = None
) -> HeadSet:
    """Resolve what the caller gave as ``heads``: a HeadSet, a heads.json, "all", the name of a shipped readout, or None
    for the model's own: those in its headrank.json, or the default readout of the embedded model.
    """
    if isinstance(heads, HeadSet):
        return heads
    if heads == "all":
        return HeadSet.all_heads(*model_size(model), model=str(model), prompt=prompt)
    if heads in shipped_readouts.NAMES:
        return shipped_readouts.shipped_readout(str(heads), model)
    if heads is not None:
        return HeadSet.load(heads)
    if str(model) == EMBEDDED or shipped_readouts.is_shipped_adapter(model):
        return shipped_readouts.shipped_readout(shipped_readouts.DEFAULT, model)
    exported = read_headrank_json(model)
    if exported is None:
        found = (
            "no headrank.json beside this model"
            if Path(model).is_dir()
            else "not a folder here, and a hub name brings no heads"
        )
        raise InputError(f"{model}: {found}; give `heads`, a file made by 'headrank select-heads'")
    try:
        return HeadSet.from_dict(exported.get("heads"))
    except InputError as error:
        raise InputError(f"{model}/headrank.json: {error}; export the model again with 'headrank export-hf'") from None


def checked_requests(
    requests: Sequence[tuple[str, Sequence[DocumentLike]]], batch_size: int
) -> tuple[ListOfPairs, int]:
    """The lists as (query, (title, text) pairs) and the batch size; a list without documents is an InputError."""
    if batch_size < 1:
        raise InputError(f"`batch_size` {batch_size} must be at least 1")
    pairs = [(query, titles_and_texts(documents)) for query, documents in requests]
    for query, documents in pairs:
        if not documents:
            raise InputError(f"no documents to rank for query {query!r}")
    return pairs, batch_size


def titles_and_texts(documents: Sequence[DocumentLike]) -> list[tuple[str, str]]:
    """Documents as (title, text); strings have no title. One string is not a list of documents, though Python could
    walk it.
    """
    if isinstance(documents, str) or not hasattr(documents, "__len__"):
        raise InputError(
            f"documents must be a list of strings or mappings, found {type(documents).__name__}: "
            f"{str(documents)[:60]!r}"
        )
    return [_title_and_text(document) for document in documents]


def _title_and_text(document: DocumentLike) -> tuple[str, str]:
    if isinstance(document, str):
        return "", document
    if (
        isinstance(document, Mapping)
        and isinstance(document.get("text"), str)
        and isinstance(document.get("title") or "", str)
    ):
        return document.get("title") or "", document["text"]
    raise InputError(
        f"a document must be a string or a mapping with 'text' (and 'title'), found {type(document).__name__}: "
        f"{str(document)[:60]!r}"
    )


def with_empty_last(scores: np.ndarray, is_empty: np.ndarray, query: str, model: str) -> np.ndarray:
    """Scores [N] in which empty documents come last; a number that is not finite is an InputError."""
    scores = np.where(is_empty, np.float32(0.0), scores)
    if not np.isfinite(scores).all():
        raise InputError(f"{model}: attention is not finite for query {query!r}; the weights hold NaN or infinity")
    if is_empty.any():
        _log.warning("query %r: %d empty documents are ranked last", query, int(is_empty.sum()))
        scores[is_empty] = (scores[~is_empty].min() if (~is_empty).any() else 0.0) - 1.0
    return scores
