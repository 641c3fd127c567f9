"""From texts to token ids and index ranges: one batched tokenizer call with offsets, no growing prefixes.

A context becomes one sequence [prefix | query branch | calibration branch]. The prefix (chat opening and documents) is
shared; each branch is late instruction, query (or the content-free calibration query), chat suffix. The three pieces
are tokenised apart, so their ids do not depend on each other and the branches really are interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.files import quote
from headrank.method.prompt import ChatFrame, PromptTemplate, control_tokens, neutralise
from headrank.method.tokens import cleaned_query, require_offsets, tokenise

Span = tuple[int, int]  # half-open token range
MIN_DOCUMENT_TOKENS = 8  # a document cut shorter than this says nothing: refuse the list instead


@dataclass(frozen=True)
class EncodedContext:
    """One prompt in tokens. Document spans are in prompt order; ``is_shortened`` says that documents were cut to
    fit.
    """

    input_ids: np.ndarray  # int32 [S] = prefix, query branch, calibration branch
    prefix_length: int
    query_length: int
    calibration_length: int  # 0 without calibration
    query_rows: Span  # I_q, absolute indices
    calibration_rows: Span  # the same rows of the calibration branch, absolute indices
    document_spans: tuple[Span, ...]
    is_shortened: bool = False
    is_parallel: bool = False  # documents do not see each other, see headrank/method/parallel_layout.py
    document_texts: tuple[str, ...] = ()  # as they stand in the prompt; only when asked for with keep_text
    token_offsets: tuple[np.ndarray, ...] = ()  # [tokens, 2] characters within its document text; only with keep_text

    @property
    def length(self) -> int:
        """Tokens in all three parts."""
        return len(self.input_ids)


class PromptEncoder:
    """Turns (query, documents) into EncodedContext for one tokenizer and one template."""

    def __init__(
        self, tokenizer: Any, template: PromptTemplate, max_length: int | None = None, calibrate: bool = True
    ) -> None:
        """``max_length`` is the model's context; longer prompts have their documents shortened evenly."""
        require_offsets(tokenizer)
        self.tokenizer, self.template, self.max_length = tokenizer, template, max_length
        self.frame = ChatFrame.of(tokenizer, template)
        self._special = control_tokens(tokenizer)
        self._calibration = (
            self._branches([cleaned_query(template.calibration_query, self._special)])[0]
            if calibrate
            else (np.empty(0, np.int32), (0, 0))
        )

    def encode(self, query: str, documents: Sequence[tuple[str, str]], *, keep_text: bool = False) -> EncodedContext:
        """Encode one query with its (title, text) documents in prompt order."""
        return self.encode_many([(query, documents)], keep_text=keep_text)[0]

    def encode_many(
        self, contexts: Sequence[tuple[str, Sequence[tuple[str, str]]]], *, keep_text: bool = False
    ) -> list[EncodedContext]:
        """Encode many contexts with one tokenizer call for the prefixes and one for the branches."""
        if self.template.is_late:
            raise InputError("a late layout has no prompt of query and documents together; its encoder is LateEncoder")
        queries = [cleaned_query(query, self._special) for query, _ in contexts]
        for query, documents in contexts:
            if not documents:
                raise InputError(f"no documents to rank for query {query!r}")
        prefixes = [self._prefix([self._clean(*document) for document in documents]) for _, documents in contexts]
        branches = self._branches(queries)
        tokenised = self._tokenise_pieces([pieces for pieces, _ in prefixes])
        parts = zip(contexts, prefixes, tokenised, branches, strict=True)
        return [self._join(query, prefix, tokens, branch, keep_text) for (query, _), prefix, tokens, branch in parts]

    def _clean(self, title: str, text: str) -> str:
        return neutralise(self.template.document_text(title, text), self._special)

    def _prefix(self, documents: Sequence[str]) -> tuple[list[str], list[Span]]:
        """The pieces of the prefix that are tokenised apart, and the character range of every document in all of it.

        A sequential prompt is one piece and numbers its documents. A parallel one has a piece for the opening and for
        every document, without numbers, so that a document's tokens are the same at any place of the list.
        """
        pieces, ranges = [self.frame.before + self.template.opening], []
        position = len(pieces[0])
        for number, document in enumerate(documents, start=1):
            label = self.template.label(number)
            # the number "[3]" is not part of the document, unless asked for: its attention would be counted as the
            # document's
            start = position if self.template.label_in_span else position + len(label)
            ranges.append((start, position + len(label) + len(document)))
            # the blank line stands behind the last document too, so that every document ends alike
            pieces.append(f"{label}{document}\n\n")
            position += len(pieces[-1])
        return pieces if self.template.is_parallel else ["".join(pieces)], ranges

    def _tokenise_pieces(self, texts: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and character offsets [S, 2] of each text that is given in pieces."""
        tokenised = iter(tokenise(self.tokenizer, [piece for pieces in texts for piece in pieces]))
        joined = []
        for pieces in texts:
            starts = np.cumsum([0, *map(len, pieces)])
            parts = [
                (ids, offsets + start)
                for (ids, offsets), start in zip((next(tokenised) for _ in pieces), starts[:-1], strict=True)
            ]
            joined.append(
                (np.concatenate([ids for ids, _ in parts]), np.concatenate([offsets for _, offsets in parts]))
            )
        return joined

    def _branches(self, queries: Sequence[str]) -> list[tuple[np.ndarray, Span]]:
        """Ids of instruction + query + chat suffix and the rows of I_q among them, for each cleaned query."""
        instruction = self.template.instruction
        texts = [f"{instruction}{query}{self.frame.after}" for query in queries]
        branches = []
        for query, (ids, offsets) in zip(queries, tokenise(self.tokenizer, texts), strict=True):
            first, last = _tokens_in(offsets, len(instruction), len(instruction) + len(query))
            branches.append((ids, self._rows(first, last, len(ids))))
        return branches

    def _rows(self, first: int, last: int, length: int) -> Span:
        """I_q in a branch of ``length`` tokens whose query stands at first to last."""
        rows = self.template.query_rows
        start = 0 if rows.startswith("instruction") else first
        if rows in ("query-suffix", "instruction"):
            return start, length
        return start, min(last + (rows == "instruction-query-next"), length)

    def _join(
        self,
        query: str,
        prefix: tuple[list[str], list[Span]],
        tokens: tuple[np.ndarray, np.ndarray],
        branch: tuple[np.ndarray, Span],
        keep_text: bool,
    ) -> EncodedContext:
        """Put the three parts together, shortening the documents first when they do not fit the model."""
        (pieces, ranges), (prefix_ids, offsets) = prefix, tokens
        text = "".join(pieces)
        branch_ids, rows = branch
        calibration_ids, calibration_rows = self._calibration
        is_shortened = False
        if self.max_length is not None:
            # positions and not tokens: both branches restart after the prefix, so only the longer one takes room
            room = self.max_length - max(len(branch_ids), len(calibration_ids))
            if self._positions(offsets, ranges) > room:
                text, ranges, prefix_ids, offsets = self._shorten(query, text, ranges, offsets, room)
                is_shortened = True
        # spans come from character offsets of the whole text: tokenising documents apart would give other tokens at
        # their edges
        spans = tuple(_tokens_in(offsets, *span) for span in ranges)
        start = len(prefix_ids)
        second = start + len(branch_ids)
        return EncodedContext(
            input_ids=np.concatenate([prefix_ids, branch_ids, calibration_ids]),
            prefix_length=start,
            query_length=len(branch_ids),
            calibration_length=len(calibration_ids),
            query_rows=(start + rows[0], start + rows[1]),
            calibration_rows=(second + calibration_rows[0], second + calibration_rows[1]),
            document_spans=spans,
            is_shortened=is_shortened,
            is_parallel=self.template.is_parallel,
            document_texts=tuple(text[begin:end] for begin, end in ranges) if keep_text else (),
            token_offsets=tuple(
                np.clip(offsets[first:last] - begin, 0, end - begin)
                for (first, last), (begin, end) in zip(spans, ranges, strict=True)
            )
            if keep_text
            else (),
        )

    def _positions(self, offsets: np.ndarray, ranges: Sequence[Span]) -> int:
        """Positions that a prefix takes: one per token, or those of the opening and the longest document in the
        parallel layout.
        """
        if not self.template.is_parallel:
            return len(offsets)
        starts = [_tokens_in(offsets, *span)[0] for span in ranges]
        return starts[0] + int(np.diff([*starts, len(offsets)]).max())

    def _shorten(
        self, query: str, text: str, ranges: list[Span], offsets: np.ndarray, room: int
    ) -> tuple[str, list[Span], np.ndarray, np.ndarray]:
        """Cut every document to the same number of tokens, the largest that fits ``room``; short ones stay whole."""
        spans = [_tokens_in(offsets, *span) for span in ranges]
        lengths = np.array([end - start for start, end in spans])
        limit = _even_limit(lengths, room - (len(offsets) - int(lengths.sum())))
        if self.template.is_parallel:  # no document takes room from another
            limit = room - (self._positions(offsets, ranges) - int(lengths.max()))
        while limit >= min(MIN_DOCUMENT_TOKENS, int(lengths.max())):
            pieces = []
            for number, ((first, last), (begin, end)) in enumerate(zip(spans, ranges, strict=True), start=1):
                # cut the text and tokenise again: a prefix of token ids need not be what the tokenizer makes of the cut
                # text
                cut = end if last - first <= limit else int(offsets[first + limit - 1][1])
                # the label is written anew
                own = begin + len(self.template.label(number)) * self.template.label_in_span
                pieces.append(text[own:cut].rstrip())
            new_pieces, new_ranges = self._prefix(pieces)
            new_ids, new_offsets = self._tokenise_pieces([new_pieces])[0]
            excess = self._positions(new_offsets, new_ranges) - room
            if excess <= 0:
                return "".join(new_pieces), new_ranges, new_ids, new_offsets
            limit -= max(1, excess // len(spans))  # a cut may split a token in two: take a little more
        if self.template.is_parallel:
            raise InputError(
                f"query {quote(query)}: the query leaves no room for a document of {MIN_DOCUMENT_TOKENS} tokens in "
                "the model's context of "
                f"{self.max_length} tokens; shorten the query"
            )
        raise InputError(
            f"query {quote(query)}: {len(ranges)} documents do not fit the model's context of {self.max_length} "
            "tokens even at "
            f"{MIN_DOCUMENT_TOKENS} tokens each; rank fewer documents (`depth`) or shorten the query"
        )


def _tokens_in(offsets: np.ndarray, begin: int, end: int) -> Span:
    """The tokens that overlap the characters [begin, end); an empty range of characters holds no token."""
    if end <= begin:
        first = int(np.searchsorted(offsets[:, 0], begin))
        return first, first
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left"))
    return first, max(first, last)


def _even_limit(lengths: np.ndarray, room: int) -> int:
    """The largest t with sum(min(length, t)) <= room; 0 or less when there is none."""
    low, high = 0, int(lengths.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(lengths, middle).sum()) <= room else (low, middle - 1)
    return low
