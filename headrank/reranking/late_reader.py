"""The late layout on a Hugging Face decoder: keys of passages and query vectors, each from a forward of its own.

The opening's keys and values are computed once and stand before every passage and every query branch. On a CPU every
forward has one of a few fixed shapes (a length bucket times a number of rows that the bucket alone decides), so that a
passage's keys are the same bits whatever it is computed with: matrix kernels round differently at different shapes.

Shapes: B rows of a batch, T tokens of a row (its bucket), O tokens of the opening, G key-value groups, H query heads, D
head size, A key pairs, K heads, R query rows, N passages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.late_layout import KeyPair, PassageKeys, QueryVectors, key_pairs, late_scores, opening_log_sums
from headrank.method.late_prompt import EncodedPassage, EncodedQuery, LateEncoder, late_limit
from headrank.method.readout import Readout
from headrank.reranking.capture import ExitEarly, LateForward
from headrank.reranking.reader import AttentionReader

# a few fixed lengths and batch sizes: matrix kernels round differently for other shapes, and a passage must have the
# same keys in any batch
BUCKETS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_CPU_TOKENS, _GPU_TOKENS = 192, 16384  # of one batch: on a CPU matrix kernels are near their best from here on


def bucket_of(length: int) -> int:
    """The padded length that a row of ``length`` tokens gets."""
    fitting = [bucket for bucket in BUCKETS if bucket >= length]
    return fitting[0] if fitting else -(-length // BUCKETS[-1]) * BUCKETS[-1]


def _query_bucket(length: int) -> int:
    """The padded length of a query: in steps of four where a step of sixteen would be most of it."""
    return -(-length // 4) * 4 if length <= BUCKETS[1] else bucket_of(length)


class LateReader:
    """Computes and scores the late layout's keys and query vectors for one HeadSet on one AttentionReader."""

    def __init__(self, reader: AttentionReader, heads: HeadSet, tokens_per_batch: int | None = None) -> None:
        """``heads`` has a late prompt and a log-mass readout; the model must fit the prompt's positions."""
        readout = heads.readout
        assert readout is not None and heads.prompt.is_late, "checked by HeadSet"
        self.reader, self.heads, self.readout = reader, heads, readout
        limit = late_limit(reader.config, heads.prompt, reader.name)
        self.encoder = LateEncoder(reader.tokenizer, heads.prompt, limit)
        self.num_groups = int(getattr(reader.config, "num_key_value_heads", None) or reader.num_heads)
        self.pairs, self.pair_of_head = key_pairs(heads.heads, reader.num_heads // self.num_groups)
        self.weights_K = torch.tensor(readout.weights, dtype=torch.float32, device=reader.device)
        self.offsets_K = (
            torch.tensor(readout.offsets, dtype=torch.float32, device=reader.device) if readout.offsets else None
        )
        self._groups: dict[int, list[int]] = {}
        for layer, group in self.pairs:
            self._groups.setdefault(layer, []).append(group)
        self._heads = heads.by_layer()
        # vectors are captured layer by layer, weights stand in the order of the file
        in_layer_order = [(layer, head) for layer, chosen in self._heads.items() for head in chosen]
        self._place_of_head = [in_layer_order.index(head) for head in heads.heads]
        self._opening: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._opening_keys: torch.Tensor | None = None
        self._most_tokens = tokens_per_batch or (_CPU_TOKENS if reader.device.type == "cpu" else _GPU_TOKENS)

    def rows_of(self, bucket: int) -> int:
        """Rows of a batch in this bucket; the bucket alone decides, so that shapes are fixed."""
        return max(1, self._most_tokens // bucket)

    @torch.inference_mode()
    def passage_keys(self, passages: Sequence[EncodedPassage]) -> Iterator[tuple[list[int], PassageKeys]]:
        """Batches of (indices into ``passages``, their keys), shortest passages first; empty passages get keys of
        length 0.
        """
        by_bucket: dict[int, list[int]] = {}
        for index, passage in enumerate(passages):
            by_bucket.setdefault(bucket_of(max(1, len(passage.input_ids))), []).append(index)
        for bucket in sorted(by_bucket):
            size = self.rows_of(bucket)
            for start in range(0, len(by_bucket[bucket]), size):
                indices = by_bucket[bucket][start : start + size]
                yield indices, self._keys_of([passages[index].input_ids for index in indices], bucket, size)

    def _keys_of(self, rows: Sequence[np.ndarray], bucket: int, size: int) -> PassageKeys:
        """One forward of ``size`` rows (missing ones are padding) and the keys of the real rows."""
        # always 'size' rows, also for the last few passages: a smaller batch may be rounded differently
        ids = np.full((size, bucket), self.reader.tokenizer.pad_token_id or 0, np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
        start = len(self.encoder.opening_ids)
        forward = LateForward(self.pairs[-1][0], self.opening(), groups_by_layer=self._groups)
        # padding may stand beyond the branch position: keep it within the positions that the model knows
        positions = (start + torch.arange(bucket)).clamp_max(self.heads.prompt.branch_position - 1)
        self._run(ids, positions, forward)
        keys_BATD = torch.cat([forward.keys[layer] for layer in self._groups], dim=1)[: len(rows)]
        lengths = torch.tensor([len(tokens) for tokens in rows], device=keys_BATD.device)
        return PassageKeys(self._finite(keys_BATD), lengths)

    def query_vectors(self, query: EncodedQuery) -> QueryVectors:
        """The vectors of the query's own tokens and their log sums over the opening, U = 1."""
        return self.vectors_of([query])[0]

    @torch.inference_mode()
    def vectors_of(self, queries: Sequence[EncodedQuery]) -> list[QueryVectors]:
        """The same of many queries; those of one length share forwards where the kernels allow it."""
        found: dict[int, QueryVectors] = {}
        by_bucket: dict[int, list[int]] = {}
        for index, query in enumerate(queries):
            by_bucket.setdefault(_query_bucket(len(query.input_ids)), []).append(index)
        for bucket, members in by_bucket.items():
            size = self._queries_at_a_time(bucket)
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                found.update(zip(chosen, self._vectors([queries[index] for index in chosen], bucket), strict=True))
        return [found[index] for index in range(len(queries))]

    def _queries_at_a_time(self, bucket: int) -> int:
        # plain products on a CPU round differently at another number of rows; packed and integer ones do not
        is_alone = self.reader.device.type == "cpu" and not getattr(self.reader.model, "is_joined", False)
        return 1 if is_alone else self.rows_of(bucket)

    def _vectors(self, queries: Sequence[EncodedQuery], bucket: int) -> list[QueryVectors]:
        """One forward of queries that fit the bucket."""
        lengths = [len(query.input_ids) for query in queries]
        ids = np.full((len(queries), bucket), self.reader.tokenizer.pad_token_id or 0, np.int64)
        for row, query in enumerate(queries):
            ids[row, : lengths[row]] = query.input_ids
        opening, start = self.opening(), self.heads.prompt.branch_position
        first = min(query.first_row for query in queries)
        forward = LateForward(max(self._heads), opening, heads_by_layer=self._heads, rows=slice(first, max(lengths)))
        self._run(ids, (start + torch.arange(bucket)).clamp_max(start + max(lengths) - 1), forward)
        vectors_UKRD = torch.cat([forward.vectors[layer] for layer in self._heads], dim=1)[
            :, self._place_of_head
        ].float()
        assert self._opening_keys is not None
        made = []
        for row, query in enumerate(queries):
            # contiguous: its products must not depend on what else was in the forward
            vectors_1KRD = self._finite(
                vectors_UKRD[row : row + 1, :, query.first_row - first : lengths[row] - first].contiguous()
            )
            sums_1KR = opening_log_sums(vectors_1KRD, self._opening_keys, self.pair_of_head)
            weights_1R = torch.full((1, query.num_rows), 1.0 / query.num_rows, device=vectors_1KRD.device)
            made.append(QueryVectors(vectors_1KRD, sums_1KR, weights_1R))
        return made

    @torch.inference_mode()
    def scores(self, query: QueryVectors, passages: PassageKeys) -> torch.Tensor:
        """Scores [N] of one batch of passages; each is a product of its own inside, so that no batch changes a bit."""
        weights, offsets, floor = self.weights_K, self.offsets_K, self.readout.floor
        return late_scores(query, passages, self.pair_of_head, weights, offsets, floor)[0]

    def opening(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the opening in every layer, computed once."""
        # the opening is the same for every passage and query: its keys and values are computed once per reranker
        if self._opening is None:
            forward = LateForward(self.pairs[-1][0], groups_by_layer=self._groups)
            with torch.inference_mode():
                self._run(
                    self.encoder.opening_ids[None].astype(np.int64),
                    torch.arange(len(self.encoder.opening_ids)),
                    forward,
                )
                self._opening_keys = torch.cat([forward.keys[layer] for layer in self._groups], dim=1)[0]
            self._opening = forward.made
        return self._opening

    def _run(self, ids_BT: np.ndarray, positions_T: torch.Tensor, forward: LateForward) -> None:
        device = self.reader.device
        input_ids = torch.from_numpy(ids_BT).to(device)
        position_ids = positions_T.to(device).expand(input_ids.shape)
        try:
            self.reader.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, headrank=forward)
        except ExitEarly:
            return
        raise InputError(
            f"{self.reader.name}: this architecture does not call the registered attention in layer "
            f"{forward.last_layer}"
        )

    def _finite(self, values: torch.Tensor) -> torch.Tensor:
        # checked where it is made: a NaN key would be stored and spoil every later query
        if not torch.isfinite(values).all():
            raise InputError(f"{self.reader.name}: attention is not finite; the weights hold NaN or infinity")
        return values


def heads_of_pairs(heads: HeadSet, pairs: Sequence[KeyPair], num_groups: int) -> HeadSet:
    """A HeadSet with one head in each of ``pairs`` and the prompt of ``heads``: for reading keys, not for scoring."""
    group_size = heads.num_heads // num_groups
    chosen = tuple((layer, group * group_size) for layer, group in pairs)
    return HeadSet(
        chosen,
        "pairs",
        heads.model,
        heads.num_layers,
        heads.num_heads,
        prompt=heads.prompt,
        readout=Readout(weights=(1.0,) * len(chosen)),
    )
