"""vLLM's /score and /v1/score: scores in the order of the request, without sorting.

One query with many documents is one list. As many queries as documents are pairs, each a list of one: in a layout whose
scores are relative to their list (all but the late one) such a number says little, and /info says which layout is
served.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated

from pydantic import AliasChoices, Field

from headrank.serving.call import Json, RerankAnswer, RerankCall
from headrank.serving.dialects.bodies import Body
from headrank.serving.problems import Problem

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]


class ScoreBody(Body):
    """The request: queries and documents, also as text_1 and text_2 or data_1 and data_2."""

    queries: Text | Texts = Field(
        validation_alias=AliasChoices("queries", "text_1", "data_1"), description="a string or strings"
    )
    documents: str | Annotated[list[str], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("documents", "text_2", "data_2"), description="a string or strings"
    )
    model: str | None = Field(None, description="ignored: this server has one model")
    use_activation: bool | None = Field(
        None, description="false: the model's score even where the server has a curve to relevance"
    )

    def to_calls(self) -> list[RerankCall]:
        """One list for one query, else a list of one for each pair."""
        documents = [self.documents] if isinstance(self.documents, str) else self.documents
        queries = [self.queries] if isinstance(self.queries, str) else self.queries
        wants_raw = self.use_activation is False
        if len(queries) == 1:
            return [RerankCall(queries[0], tuple(("", text) for text in documents), wants_raw=wants_raw)]
        if len(queries) != len(documents):
            raise Problem(
                400,
                f"{len(queries)} queries and {len(documents)} documents: give one query, or as many as documents",
                field="queries",
            )
        return [
            RerankCall(query, (("", text),), wants_raw=wants_raw)
            for query, text in zip(queries, documents, strict=True)
        ]


class ScoreAnswer(Body):
    """The response, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[Json]
    usage: Json


def score_answer(answers: Sequence[RerankAnswer], model: str) -> Json:
    """The response: the scores of one list by index, or of each pair."""
    rows = [document for answer in answers for document in sorted(answer.ranked, key=lambda document: document.index)]
    data = []
    for place, document in enumerate(rows):
        data.append({"index": place, "object": "score", "score": document.score} | document.extras())
    tokens = sum(answer.num_tokens for answer in answers)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage,
    }
