"""RankGPT: the model writes a ranking, window by window from the bottom of the list up.

The prompt is the one of the paper's appendix. Answers are parsed tolerantly and what a window forgets is appended in
its old order, so every run is complete; how often the model kept to the format is reported under two named definitions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.generation.generation import Answer, EndpointGenerator, Generator, LocalGenerator, Message
from headrank.method.ordering import prompt_positions, retriever_order
from headrank.method.prompt import PromptTemplate
from headrank.reranking.rerank_requests import ListScores
from headrank.reranking.reranker import DocumentLike, titles_and_texts

_log = logging.getLogger(__name__)
WINDOW, STRIDE = 20, 10  # the paper's
SUCCESS_DEFINITION = (
    "half: at least 50% of a window's identifiers recovered (the paper's appendix); strict: each identifier exactly "
    "once"
)


def ranking_messages(query: str, passages: Sequence[str]) -> list[Message]:
    """The multi-turn prompt of the appendix: system, one acknowledged turn a passage, the request for the ranking."""
    count = len(passages)
    system = (
        "You are RankGPT, an intelligent assistant that can rank passages based on their relevancy to the query. "
        f"I will provide you with {count} passages, each indicated by number identifier []. "
        f"Rank the passages based on their relevance to query: {query}."
    )
    messages = [Message("system", system)]
    for number, passage in enumerate(passages, start=1):
        messages.append(Message("user", f"[{number}] {passage}"))
        messages.append(Message("assistant", f"Received passage [{number}]."))
    request = (
        f"Search Query: {query}. Rank the {count} passages above based on their relevance to the search query. "
        "The passages should be listed in descending order using identifiers. The most relevant passages should be "
        "listed first. "
        "The output format should be [] > [], e.g., [1] > [2]. Only provide the ranking results, do not say any "
        "word or explain."
    )
    return [*messages, Message("user", request)]


def sliding_windows(num_documents: int, window: int = WINDOW, stride: int = STRIDE) -> list[tuple[int, int]]:
    """Half-open windows from the bottom up; the last one starts at 0, so no document is left out of every window.

    40 documents at 20/10 give [20, 40), [10, 30), [0, 20). A list not longer than the window is one window; a list of
    fewer than two documents needs none.
    """
    if not 1 <= stride <= window or window < 2:
        raise InputError(
            f"rankgpt: stride {stride} must be between 1 and the window {window}, which must be at least 2"
        )
    if num_documents < 2:
        return []
    ends = range(num_documents, 0, -stride)
    windows = []
    for end in ends:
        windows.append((max(0, end - window), end))
        if end <= window:
            break
    return windows


@dataclass(frozen=True)
class ParsedAnswer:
    """A window's answer: all its positions (0-based) in the new order, and how well the format was kept."""

    order: tuple[int, ...]
    num_recovered: int  # different valid identifiers that the model wrote
    is_strict: bool  # every identifier exactly once and nothing else

    @property
    def is_half(self) -> bool:
        """The appendix's success: at least half of the identifiers."""
        return 2 * self.num_recovered >= len(self.order)


def parse_ranking(text: str, num_passages: int) -> ParsedAnswer:
    """Read identifiers out of whatever the model wrote; what is missing is appended in the old order.

    Numbers in brackets count, or all numbers ("1 > 2", "[1, 2]") where brackets hold less than half of them. Thoughts
    before </think>, repetitions and numbers out of range are dropped.
    """
    text = text.rpartition("</think>")[2]
    bracketed = [int(number) for number in re.findall(r"\[\s*([0-9]{1,6})\s*\]", text)]
    numbers = [int(number) for number in re.findall(r"(?<![0-9])[0-9]{1,6}(?![0-9])", text)]

    def valid(found: list[int]) -> list[int]:
        return [number - 1 for number in dict.fromkeys(found) if 1 <= number <= num_passages]

    chosen = bracketed if 2 * len(valid(bracketed)) >= len(valid(numbers)) and bracketed else numbers
    recovered = valid(chosen)
    missing = [position for position in range(num_passages) if position not in set(recovered)]
    is_strict = sorted(chosen) == list(range(1, num_passages + 1))
    return ParsedAnswer(tuple(recovered + missing), len(recovered), is_strict)


@dataclass
class SuccessRates:
    """How often the format was kept, by window and by query (a query succeeds when all its windows do)."""

    windows: int = 0
    half_windows: int = 0
    strict_windows: int = 0
    queries: int = 0
    half_queries: int = 0
    strict_queries: int = 0
    identifiers: int = 0
    recovered_identifiers: int = 0

    def add(self, answers: Sequence[ParsedAnswer]) -> None:
        """Count the windows of one query; a query without windows has no format to keep and is not counted."""
        # a list of one passage has no window: counted as a success it would raise the rate
        if not answers:
            return
        self.queries += 1
        self.half_queries += all(answer.is_half for answer in answers)
        self.strict_queries += all(answer.is_strict for answer in answers)
        for answer in answers:
            self.windows += 1
            self.half_windows += answer.is_half
            self.strict_windows += answer.is_strict
            self.identifiers += len(answer.order)
            self.recovered_identifiers += answer.num_recovered

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates (None before the first window)."""

        def rate(part: int, whole: int) -> float | None:
            return part / whole if whole else None

        return {
            "definition": SUCCESS_DEFINITION,
            "half": rate(self.half_windows, self.windows),
            "strict": rate(self.strict_windows, self.windows),
            "half_queries": rate(self.half_queries, self.queries),
            "strict_queries": rate(self.strict_queries, self.queries),
            "recovered_identifiers": rate(self.recovered_identifiers, self.identifiers),
            "num_windows": self.windows,
            "num_queries": self.queries,
        }


@dataclass(frozen=True)
class GeneratedScores(ListScores):
    """A list ranked by generation, with how its windows kept the format: what ``SuccessRates.add`` counts."""

    answers: tuple[ParsedAnswer, ...] = ()


@dataclass
class _ListState:
    """One list on its way through the windows: ``order`` holds document indices, best first."""

    query: str
    passages: list[tuple[str, str]]
    windows: Iterator[tuple[int, int]]
    order: list[int]
    positions: tuple[int, ...]  # in the first prompt
    answers: list[ParsedAnswer] = field(default_factory=list)
    num_tokens: int = 0
    is_shortened: bool = False


class RankGPT:
    """Ranks lists by generated permutations; ``success`` tells how often the format was kept so far."""

    def __init__(
        self, generator: Generator, *, window: int = WINDOW, stride: int = STRIDE, prompt: PromptTemplate | None = None
    ) -> None:
        """``prompt`` says how a document is cut to words and the order to begin with; the rest of it belongs to the
        attention methods.
        """
        sliding_windows(2, window, stride)  # refuse wrong numbers now, not at the first list
        self.generator, self.window, self.stride, self.prompt = generator, window, stride, prompt or PromptTemplate()
        self._success = SuccessRates()

    @property
    def success(self) -> dict[str, Any]:
        """Success rates of everything ranked so far, with their definition."""
        return self._success.to_dict()

    def score_batch(self, requests: Sequence[tuple[str, Sequence[DocumentLike]]]) -> list[ListScores]:
        """Scores N, N - 1, ..., 1 by final position, in the order the documents were given.

        The windows of a list follow each other; the lists go side by side, as many at once as the generator takes.
        """
        states = []
        for query, documents in requests:
            if not documents:
                raise InputError(f"no documents to rank for query {query!r}")
            windows = iter(sliding_windows(len(documents), self.window, self.stride))
            order = retriever_order(self.prompt, len(documents))
            states.append(
                _ListState(query, titles_and_texts(documents), windows, order, tuple(prompt_positions(order)))
            )
        pending = [(state, window) for state in states if (window := next(state.windows, None))]
        while pending:
            self._advance(pending)
            pending = [(state, window) for state, _ in pending if (window := next(state.windows, None))]
        return [self._finish(state) for state in states]

    def _advance(self, pending: Sequence[tuple[_ListState, tuple[int, int]]]) -> None:
        """Generate and apply one window of every list that still has one."""
        prompts = []
        for state, (start, end) in pending:
            passages = [state.passages[index] for index in state.order[start:end]]
            messages, is_cut = self._fitting_messages(state.query, passages)
            state.is_shortened |= is_cut
            prompts.append(messages)
        # one limit on new tokens for the whole batch: the longest window needs the most identifiers
        longest = max(end - start for _, (start, end) in pending)
        answers = self.generator.generate(prompts, num_identifiers=longest)
        for (state, (start, end)), answer in zip(pending, answers, strict=True):
            self._apply(state, start, end, answer)

    def _apply(self, state: _ListState, start: int, end: int, answer: Answer) -> None:
        parsed = parse_ranking(answer.text, end - start)
        _log.debug(
            "rankgpt: query %r ranks %d-%d: %d recovered: %r",
            state.query,
            start + 1,
            end,
            parsed.num_recovered,
            answer.text,
        )
        # only the window moves; what it read keeps the places of the window
        state.order[start:end] = [state.order[start + position] for position in parsed.order]
        state.answers.append(parsed)
        state.num_tokens += answer.num_tokens

    def _fitting_messages(self, query: str, passages: Sequence[tuple[str, str]]) -> tuple[list[Message], bool]:
        """The prompt with every passage cut to the same number of words, the largest that fits the model."""

        def build(limit: int) -> list[Message]:
            texts = [self.prompt.document_text(title, text).split(" ")[:limit] for title, text in passages]
            return ranking_messages(query, [" ".join(words) for words in texts])

        limit = max(len(self.prompt.document_text(title, text).split(" ")) for title, text in passages)
        if self.generator.fits(build(limit), len(passages)):
            return build(limit), False
        # every passage loses the same words: cutting the last ones alone would decide their ranks
        low, high = 0, limit  # low fits (or is 0), high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.generator.fits(build(middle), len(passages)) else (low, middle)
        if low == 0:
            raise InputError(
                f"rankgpt: {len(passages)} passages do not fit the model's context even at one word each; rank "
                "fewer (`depth`) or take a "
                "smaller window"
            )
        return build(low), True

    def _finish(self, state: _ListState) -> GeneratedScores:
        self._success.add(state.answers)
        scores = np.empty(len(state.order), np.float32)
        # ranks as scores: a generated order has no others
        scores[state.order] = np.arange(len(state.order), 0, -1, dtype=np.float32)
        return GeneratedScores(scores, state.num_tokens, state.is_shortened, state.positions, tuple(state.answers))


def build_rankgpt(
    model: str | Path,
    *,
    api_base: str | None = None,
    window: int = WINDOW,
    stride: int = STRIDE,
    prompt: PromptTemplate | None = None,
    batch_size: int = 1,
    **options: Any,
) -> RankGPT:
    """RankGPT on a Hugging Face chat model, or on the OpenAI-compatible endpoint ``api_base`` (then ``model`` is its
    name there).
    """
    if api_base is not None:
        # the server's business
        given = {key: value for key, value in options.items() if key not in ("device", "dtype")}
        generator: Generator = EndpointGenerator(api_base, str(model), **{"concurrency": batch_size, **given})
    else:
        generator = LocalGenerator.load(model, batch_size=batch_size, **options)
    return RankGPT(generator, window=window, stride=stride, prompt=prompt)
