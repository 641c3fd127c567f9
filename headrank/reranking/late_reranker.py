"""Reranking in the late layout: passages and queries are computed apart, each passage once, and meet in a scan of keys.

Shapes: N passages of a batch, A key pairs, T tokens (padded to the bucket), D head size, K heads, R query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from headrank.method.heads import HeadSet
from headrank.method.late_layout import PassageKeys, QueryVectors, late_token_values
from headrank.reranking.explain import Explanation, TokenScores
from headrank.reranking.joined import pack
from headrank.reranking.key_source import (
    DEFAULT_BYTES,
    KeptKeys,
    KeySource,
    KeyUsage,
    Passage,
    RecentPassages,
    ScoringSource,
    StoredScore,
)
from headrank.reranking.late_reader import LateReader, bucket_of
from headrank.reranking.reader import AttentionReader
from headrank.reranking.rerank_requests import ListScores
from headrank.reranking.reranker import (
    DocumentLike,
    HeadRankReranker,
    checked_requests,
    titles_and_texts,
    with_empty_last,
)

LISTS_AT_A_TIME = 32  # their passages fill batches together; only query vectors are held for all of them
_MOST_LOGITS = 1 << 26  # of one product of query rows and passage tokens: 256 MB
_FOUND_AT_A_TIME = 64  # passages whose kept keys are copied into one batch


class LateReranker(HeadRankReranker):
    """Scores that depend on the query and one passage: no list, order or batch changes them, on a CPU not even a
    bit.
    """

    def __init__(
        self,
        reader: AttentionReader,
        heads: HeadSet,
        *,
        batch_size: int | None = None,
        key_source: KeySource | None = None,
        key_cache_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """``batch_size`` is how many lists share the batches of passages; ``key_source`` is asked before a passage
        is computed.
        """
        super().__init__(reader, heads, LISTS_AT_A_TIME if batch_size is None else batch_size)
        self.late = LateReader(reader, heads)
        self.recent, self.key_source, self.usage = RecentPassages(key_cache_bytes), key_source, KeyUsage()
        if key_source is not None:
            key_source.check(self.late)
        if isinstance(key_source, ScoringSource):
            pack(reader.model)  # the query's own forward is most of what is left

    def score_batch(
        self, requests: Sequence[tuple[str, Sequence[DocumentLike]]], *, batch_size: int | None = None
    ) -> list[ListScores]:
        """The scores of each list in the order its documents were given; a passage in many lists is computed once."""
        pairs, size = checked_requests(requests, self.batch_size if batch_size is None else batch_size)
        results: list[ListScores] = []
        for start in range(0, len(pairs), size):
            results += self._score_lists(pairs[start : start + size])
        return results

    def _score_lists(self, lists: Sequence[tuple[str, list[Passage]]]) -> list[ListScores]:
        """Every batch of passages is scored against all queries that want it, then let go."""
        queries = [self.late.encoder.encode_query(query) for query, _ in lists]
        vectors = self.late.vectors_of(queries)
        scores = [np.zeros(len(documents), np.float32) for _, documents in lists]
        num_tokens = [len(query.input_ids) for query in queries]
        empty = [np.zeros(len(documents), bool) for _, documents in lists]
        is_shortened = [False] * len(lists)
        places: dict[Passage, list[tuple[int, int]]] = {}
        for number, of_list in enumerate(self._stored_scores(lists, vectors)):
            for index, (document, stored) in enumerate(zip(lists[number][1], of_list, strict=True)):
                if stored is None:
                    places.setdefault(document, []).append((number, index))
                    continue
                scores[number][index], empty[number][index] = stored.score, stored.num_tokens == 0
                num_tokens[number] += stored.num_tokens
                is_shortened[number] |= stored.is_shortened
        for documents, keys, shortened in self._batches(list(places)):
            lengths = keys.lengths_N.tolist()
            for number, rows in _rows_by_list(documents, places).items():
                of_rows = self._scores_of(vectors[number], keys, [row for row, _ in rows])
                for (row, index), score in zip(rows, of_rows, strict=True):
                    scores[number][index], empty[number][index] = score, lengths[row] == 0
                    num_tokens[number] += lengths[row]
                    is_shortened[number] |= shortened[row]
        self.usage.tokens_read += sum(num_tokens) - sum(len(query.input_ids) for query in queries)
        return [
            ListScores(
                with_empty_last(scores[number], empty[number], query, self.reader.name),
                num_tokens[number],
                is_shortened[number],
            )
            for number, (query, _) in enumerate(lists)
        ]

    def _stored_scores(
        self, lists: Sequence[tuple[str, list[Passage]]], vectors: Sequence[QueryVectors]
    ) -> list[list[StoredScore | None]]:
        """What a source that scores for itself says of each list; None where the reranker has to."""
        source = self.key_source
        if not isinstance(source, ScoringSource):
            return [[None] * len(documents) for _, documents in lists]
        missing: list[Passage] = []
        if source.adds:
            missing = source.missing(document for _, documents in lists for document in documents)
            made: list[tuple[Passage, KeptKeys]] = []
            for documents, keys, shortened in self._computed(missing):
                kept = [
                    KeptKeys(keys.keys_NATD[row, :, :length], shortened[row])
                    for row, length in enumerate(keys.lengths_N.tolist())
                ]
                made += zip(documents, kept, strict=True)
            if made:
                source.add(made)
        scores = source.score([(vectors[number], documents) for number, (_, documents) in enumerate(lists)])
        added = set(missing)  # they are in the store by now, and were not when they were asked for
        for (_, documents), of_list in zip(lists, scores, strict=True):
            self.usage.store_asked += len(documents)
            self.usage.store_found += sum(
                score is not None and document not in added for document, score in zip(documents, of_list, strict=True)
            )
        return scores

    def _scores_of(self, vectors: QueryVectors, keys: PassageKeys, rows: Sequence[int]) -> list[float]:
        """The scores of the chosen rows of a batch; a row that a list holds twice is chosen twice."""
        if list(rows) != list(range(keys.num_passages)):
            keys = PassageKeys(keys.keys_NATD[list(rows)], keys.lengths_N[list(rows)])
        # a query of thousands of tokens meets its passages a few at a time: one product of all would take tens of
        # gigabytes
        step = max(1, _MOST_LOGITS // (len(self.heads.heads) * vectors.vectors_UKRD.shape[2] * keys.keys_NATD.shape[2]))
        if step >= keys.num_passages:
            return self.late.scores(vectors, keys).tolist()
        parts = [
            PassageKeys(keys.keys_NATD[start : start + step], keys.lengths_N[start : start + step])
            for start in range(0, keys.num_passages, step)
        ]
        return [score for part in parts for score in self.late.scores(vectors, part).tolist()]

    def _batches(self, documents: Sequence[Passage]) -> Iterator[tuple[list[Passage], PassageKeys, list[bool]]]:
        """(passages, their keys, whether each was shortened), batch by batch: kept ones first, then those that have
        to be computed.
        """
        missing = list(documents)
        asked = None if isinstance(self.key_source, ScoringSource) else self.key_source
        for source in (self.recent, asked):
            if source is not None and missing:
                found = list(zip(missing, source.find(missing), strict=True))
                self._note_lookup(source, len(missing), sum(keys is not None for _, keys in found))
                missing = [document for document, keys in found if keys is None]
                yield from self._packed([(document, keys) for document, keys in found if keys is not None])
        for batch, keys, shortened in self._computed(missing):
            lengths = keys.lengths_N.tolist()
            for row, document in enumerate(batch):
                self.recent.keep(document, KeptKeys(keys.keys_NATD[row, :, : lengths[row]], shortened[row]))
            yield batch, keys, shortened

    def _note_lookup(self, source: KeySource, asked: int, found: int) -> None:
        if source is self.recent:
            self.usage.recent_asked, self.usage.recent_found = (
                self.usage.recent_asked + asked,
                self.usage.recent_found + found,
            )
        else:
            self.usage.store_asked, self.usage.store_found = (
                self.usage.store_asked + asked,
                self.usage.store_found + found,
            )

    def _computed(self, documents: Sequence[Passage]) -> Iterator[tuple[list[Passage], PassageKeys, list[bool]]]:
        """The same of passages that a forward has to make."""
        encoded = self.late.encoder.encode_passages(documents)
        for indices, keys in self.late.passage_keys(encoded):
            self.usage.tokens_computed += int(keys.lengths_N.sum())
            yield [documents[index] for index in indices], keys, [encoded[index].is_shortened for index in indices]

    def _packed(self, found: list[tuple[Passage, KeptKeys]]) -> Iterator[tuple[list[Passage], PassageKeys, list[bool]]]:
        """Kept keys in batches, padded as when they were computed: another padding would round sums differently."""
        by_bucket: dict[int, list[tuple[Passage, KeptKeys]]] = {}
        for document, keys in found:
            by_bucket.setdefault(bucket_of(max(1, keys.num_tokens)), []).append((document, keys))
        device = self.reader.device
        for bucket, members in by_bucket.items():
            for start in range(0, len(members), _FOUND_AT_A_TIME):
                chosen = members[start : start + _FOUND_AT_A_TIME]
                padded = [F.pad(keys.keys_ATD.to(device), (0, 0, 0, bucket - keys.num_tokens)) for _, keys in chosen]
                lengths = torch.tensor([keys.num_tokens for _, keys in chosen], device=device)
                packed = PassageKeys(torch.stack(padded), lengths)
                yield [document for document, _ in chosen], packed, [keys.is_shortened for _, keys in chosen]

    @torch.inference_mode()
    def explain(self, query: str, documents: Sequence[DocumentLike]) -> Explanation:
        """Which passage words answered which query words, per head; the values of a passage add up to its score."""
        passages = titles_and_texts(documents)
        finished = self._score_lists(checked_requests([(query, documents)], 1)[0])[0]
        encoded_query = self.late.encoder.encode_query(query)
        vectors = self.late.query_vectors(encoded_query)
        encoded = self.late.encoder.encode_passages(passages, keep_text=True)
        tokens: dict[int, TokenScores] = {}
        for indices, keys in self.late.passage_keys(encoded):
            values_NKRT = self._token_values(vectors, keys)
            for row, index in enumerate(indices):
                passage = encoded[index]
                matches_KRT = values_NKRT[row, :, :, : len(passage.input_ids)]
                assert passage.offsets is not None
                is_kept_T = np.ones(len(passage.input_ids), bool)
                tokens[index] = TokenScores(passage.text, passage.offsets, matches_KRT.sum(1), is_kept_T, matches_KRT)
        in_order = tuple(tokens[index] for index in range(len(passages)))
        per_head_KN = np.stack([token.per_head.sum(1) for token in in_order], axis=1)
        return Explanation(
            finished.scores,
            per_head_KN,
            self.heads.heads,
            in_order,
            finished.num_tokens,
            finished.is_shortened,
            encoded_query.text,
            encoded_query.offsets,
        )

    def _token_values(self, vectors: QueryVectors, keys: PassageKeys) -> np.ndarray:
        late = self.late
        values = late_token_values(vectors, keys, late.pair_of_head, late.weights_K, late.offsets_K, late.readout.floor)
        return values[0].cpu().numpy()


def _rows_by_list(
    documents: Sequence[Passage], places: dict[Passage, list[tuple[int, int]]]
) -> dict[int, list[tuple[int, int]]]:
    """List number -> (row of the batch, index in the list) of the passages that this list holds."""
    by_list: dict[int, list[tuple[int, int]]] = {}
    for row, document in enumerate(documents):
        for number, index in places[document]:
            by_list.setdefault(number, []).append((row, index))
    return by_list
