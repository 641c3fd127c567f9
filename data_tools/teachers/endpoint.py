"""A reranking endpoint that speaks Cohere's dialect: POST {model, query, documents} -> {results: [{index,
relevance_score}]}.

Cohere, Jina, Voyage's gateway, vLLM, LiteLLM and 'headrank serve' answer it. Such scores are often squeezed into 0..1:
the order is the teacher's, the margins are not logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from data_tools.teachers.teacher import QueryList, TeacherSpec, passage_text
from headrank.errors import InputError
from headrank.http_json import post_json

CONCURRENCY = 4


class EndpointTeacher:
    """Asks the server for one list at a time, a few lists at once."""

    def __init__(self, spec: TeacherSpec) -> None:
        """The URL is the whole address of the reranking route."""
        if not spec.name.startswith(("http://", "https://")):
            raise InputError(
                f"`teacher` {spec.name!r}: an endpoint begins with http:// or https:// and ends in its route, such "
                "as /v2/rerank"
            )
        if spec.api_model is None:
            raise InputError(f"`teacher` {spec.name}: which model of the endpoint? add `api_model` NAME")
        self._url, self._key, self._model, self._max_words = spec.name, spec.api_key, spec.api_model, spec.max_words

    def identity(self) -> dict[str, Any]:
        """Host, route and model; what weights a server runs it does not say."""
        address = urlsplit(self._url)
        return {
            "kind": "endpoint",
            "name": self._model,
            "url": f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}",
            "max_words": self._max_words,
            "scores": "relevance_score of the endpoint",
        }

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        """One request per list."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._ask, lists))

    def _ask(self, one: QueryList) -> np.ndarray:
        query, documents = one
        texts = [passage_text(document, self._max_words) for document in documents]
        body = {"model": self._model, "query": query, "documents": texts, "top_n": len(texts)}
        reply = post_json(self._url, body, key=self._key)
        scores = np.full(len(texts), math.nan)
        try:
            for result in reply["results"]:
                scores[_place(result["index"], len(texts))] = float(result["relevance_score"])
        except (KeyError, TypeError, ValueError, IndexError):
            raise InputError(f"{self._url}: the answer is no reranking: {json.dumps(reply)[:200]}") from None
        if np.isnan(scores).any():
            raise InputError(
                f"{self._url}: scored {int((~np.isnan(scores)).sum())} of {len(texts)} passages of query {query[:60]!r}"
            )
        return scores


def _place(index: Any, count: int) -> int:
    """A place of the list; a negative one would silently count from the end."""
    if not isinstance(index, int) or not 0 <= index < count:
        raise IndexError(index)
    return index
