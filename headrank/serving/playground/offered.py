"""Collections whose queries the page offers, with the candidates of their run: read once, when the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.reranking.rerank_requests import Request, requests_from_collection
from headrank.serving.call import Json

DEPTH = 20  # candidates of a query that are offered
_MOST_QUERIES = 100  # of one answer


@dataclass(frozen=True)
class OfferedCollection:
    """The lists of one collection by query id, and what was judged."""

    requests: dict[str, Request]
    grades: dict[str, dict[str, int]]

    @classmethod
    def read(cls, collection: Collection) -> OfferedCollection:
        """Queries without candidates are left out."""
        requests = {request.query_id: request for request in requests_from_collection(collection, depth=DEPTH)}
        if not requests:
            raise InputError(f"{collection.run_path}: no candidates to offer; make them with 'headrank retrieve'")
        return cls(requests, collection.qrels() if collection.qrels_path is not None else {})

    def queries(self, contains: str) -> list[Json]:
        """The first queries that hold every word of ``contains``."""
        words = contains.casefold().split()
        found = (
            request for request in self.requests.values() if all(word in request.query.casefold() for word in words)
        )
        return [
            {"id": request.query_id, "query": request.query}
            for request, _ in zip(found, range(_MOST_QUERIES), strict=False)
        ]

    def candidates(self, query_id: str) -> Json | None:
        """A query with its passages in the order of the run; None where the collection has none."""
        request = self.requests.get(query_id)
        if request is None:
            return None
        judged = self.grades.get(query_id, {})
        documents: list[Json] = []
        for document in request.documents:
            shown: Json = {"id": document.doc_id, "title": document.title, "text": document.text}
            if document.doc_id in judged:
                shown["grade"] = judged[document.doc_id]
            documents.append({name: value for name, value in shown.items() if value != ""} | {"text": document.text})
        return {"id": query_id, "query": request.query, "documents": documents}


def read_collections(folders: Sequence[str]) -> dict[str, OfferedCollection]:
    """By folder name; two of the same name are an InputError, as the page could not tell them apart."""
    found: dict[str, OfferedCollection] = {}
    for folder in folders:
        collection = Collection.open(folder)
        if collection.name in found:
            raise InputError(
                f"`collection` {folder}: a second collection named {collection.name!r}; rename one of the folders"
            )
        found[collection.name] = OfferedCollection.read(collection)
    return found
