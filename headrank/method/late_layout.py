"""The late layout: a query branch that reads no passage, and the score of a passage from its keys alone. Pure tensor
functions.

A passage reads the opening and itself. The query branch stands at a fixed position after the opening and reads the
opening and itself; its attention to passages is measured at the readout's heads and mixed into nothing. A score then
depends on the query and that passage only: passages can be computed once, kept, and met by any query.

Shapes: U queries, K heads, A key pairs, R query rows, N passages, T tokens of the longest passage, O tokens of the
opening, D head size, G key-value groups, H query heads. A *key pair* is a (layer, key-value group): heads of one group
share its keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrank.method.readout import mean_over_rows, row_values, weighted_sum

KeyPair = tuple[int, int]  # (layer, key-value group)


def key_pairs(heads: Sequence[tuple[int, int]], group_size: int) -> tuple[tuple[KeyPair, ...], tuple[int, ...]]:
    """The key pairs that (layer, head) pairs read, sorted, and for each head the index of its pair.

    ``group_size`` is the number of query heads of a key-value group.
    """
    pairs = tuple(sorted({(layer, head // group_size) for layer, head in heads}))
    place = {pair: index for index, pair in enumerate(pairs)}
    return pairs, tuple(place[layer, head // group_size] for layer, head in heads)


@dataclass(frozen=True)
class PassageKeys:
    """Keys (after rotary embedding) of passages at the readout's key pairs, right-padded: all that a score needs of
    them.
    """

    keys_NATD: torch.Tensor
    lengths_N: torch.Tensor  # real tokens; 0 for an empty passage

    @property
    def num_passages(self) -> int:
        """How many passages there are."""
        return int(self.keys_NATD.shape[0])


@dataclass(frozen=True)
class QueryVectors:
    """Query vectors (after rotary embedding, times the attention scale) of the query's rows at the readout's heads.

    ``opening_UKR`` is the log sum of each row over the opening. Rows are padded where queries differ in length:
    ``weights_UR`` is 1/|I_q| on real rows and 0 on padding.
    """

    vectors_UKRD: torch.Tensor
    opening_UKR: torch.Tensor
    weights_UR: torch.Tensor


def opening_log_sums(vectors_UKRD: torch.Tensor, keys_AOD: torch.Tensor, pair_of_head: Sequence[int]) -> torch.Tensor:
    """The log sum of each query row over the opening's keys, float32 [U, K, R]."""
    keys_KOD = keys_AOD[list(pair_of_head)].float()
    return torch.matmul(vectors_UKRD.float(), keys_KOD.transpose(-1, -2)).logsumexp(-1)


def passage_log_sums(queries: QueryVectors, passages: PassageKeys, pair_of_head: Sequence[int]) -> torch.Tensor:
    """Log-sum-exp of q.k over each passage's tokens, float32 [U, N, K, R]; -inf for an empty passage. Differentiable.

    One batched product with an item per passage and key pair, so that the number and the order of passages change no
    bit.
    """
    num_queries, _, num_rows, size = queries.vectors_UKRD.shape
    num_passages, num_pairs, num_tokens, _ = passages.keys_NATD.shape
    slots, most = head_slots(pair_of_head, num_pairs)
    vectors = queries.vectors_UKRD.float().transpose(0, 1).flatten(1, 2)  # [K, U * R, D]
    with torch.autocast(vectors.device.type, enabled=False):
        # heads that share keys go into one product; pairs with fewer heads are filled with zero vectors, whose results
        # nobody takes
        by_pair = vectors.new_zeros(num_pairs * most, *vectors.shape[1:]).index_copy(
            0, slots.to(vectors.device), vectors
        )
        by_pair = by_pair.reshape(num_pairs, most * num_queries * num_rows, size)
        logits_NAXT = torch.matmul(by_pair, passages.keys_NATD.float().transpose(-1, -2))
        is_padding_NT = torch.arange(num_tokens, device=vectors.device) >= passages.lengths_N[:, None]
        # a finite mask: log-sum-exp over nothing but -inf has no gradient, and an empty passage is set below
        sums_NAX = logits_NAXT.masked_fill(is_padding_NT[:, None, None], -1e30).logsumexp(-1)
    sums = sums_NAX.reshape(num_passages, num_pairs * most, num_queries, num_rows)[:, slots.to(vectors.device)]
    return sums.permute(2, 0, 1, 3).contiguous().masked_fill((passages.lengths_N == 0)[:, None, None], -math.inf)


def head_slots(pair_of_head: Sequence[int], num_pairs: int) -> tuple[torch.Tensor, int]:
    """A place for every head among [pairs, most heads of a pair], flattened, and that number."""
    counts = [0] * num_pairs
    numbers = []
    for pair in pair_of_head:
        numbers.append(counts[pair])
        counts[pair] += 1
    most = max(counts)
    return torch.tensor([pair * most + number for pair, number in zip(pair_of_head, numbers, strict=True)]), most


def late_scores(
    queries: QueryVectors,
    passages: PassageKeys,
    pair_of_head: Sequence[int],
    weights_K: torch.Tensor,
    offsets_K: torch.Tensor | None = None,
    floor: float = 0.0,
) -> torch.Tensor:
    """score(q, d) of every query and passage, float32 [U, N]: sum_h w_h mean_i log(exp(lse_passage - lse_opening - c_h)
    + f).

    Heads may be those of one tensor-parallel rank: the sum over ranks of what each gets is the score. Scores of one
    query can be compared wherever its passages come from; those of different queries cannot. An empty passage gets 0:
    its caller ranks it last.
    """
    return weighted_sum(late_head_values(queries, passages, pair_of_head, offsets_K, floor), weights_K)


def late_head_values(
    queries: QueryVectors,
    passages: PassageKeys,
    pair_of_head: Sequence[int],
    offsets_K: torch.Tensor | None = None,
    floor: float = 0.0,
) -> torch.Tensor:
    """s_h(q, d) before the weights, float32 [U, N, K]; 0 for an empty passage."""
    is_empty_N11 = (passages.lengths_N == 0)[:, None, None]
    sums_UNKR = passage_log_sums(queries, passages, pair_of_head).masked_fill(is_empty_N11, 0.0)
    values_UNK = mean_over_rows(row_values(sums_UNKR, queries.opening_UKR, offsets_K, floor), queries.weights_UR)
    return values_UNK.masked_fill(is_empty_N11[..., 0], 0.0)


def late_token_values(
    queries: QueryVectors,
    passages: PassageKeys,
    pair_of_head: Sequence[int],
    weights_K: torch.Tensor,
    offsets_K: torch.Tensor | None = None,
    floor: float = 0.0,
) -> torch.Tensor:
    """The score of every query and passage taken apart by head, row and token, float32 [U, N, K, R, T]; 0 on padding.

    A row's value is shared among the passage's tokens as the row's attention to them is, so that all of them add up to
    the score.
    """
    is_empty_N11 = (passages.lengths_N == 0)[:, None, None]
    sums_UNKR = passage_log_sums(queries, passages, pair_of_head).masked_fill(is_empty_N11, 0.0)
    values_UNKR = row_values(sums_UNKR, queries.opening_UKR, offsets_K, floor) * queries.weights_UR[:, None, None, :]
    keys_NKTD = passages.keys_NATD[:, list(pair_of_head)].float()
    logits_UNKRT = torch.einsum("ukrd,nktd->unkrt", queries.vectors_UKRD.float(), keys_NKTD)
    is_padding_NT = torch.arange(keys_NKTD.shape[2], device=logits_UNKRT.device) >= passages.lengths_N[:, None]
    shares_UNKRT = (logits_UNKRT - sums_UNKR[..., None]).exp().masked_fill(is_padding_NT[:, None, None, :], 0.0)
    return shares_UNKRT * (values_UNKR * weights_K[:, None])[..., None]
