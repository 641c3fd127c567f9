"""The late layout on a tensor-parallel rank: what its layers capture, and the scores that its heads contribute.

One forward of one packed sequence holds the opening, the query branches and the passages of a micro-batch. Each layer
of the readout keeps the query rows' vectors at this rank's heads and all keys at this rank's key pairs; the score is
then ``headrank.method.late_layout`` on this rank's heads, summed over ranks.

Shapes: S tokens, U queries, R rows of the longest query, N passages, T tokens of the longest passage, K this rank's
readout heads, A its key pairs, D head size, Q query tokens of all queries together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from headrank.method.heads import Head, HeadSet
from headrank.method.late_layout import PassageKeys, QueryVectors, key_pairs, late_scores, opening_log_sums
from headrank.method.readout import Readout
from megatron_patches.packed_rows import PackedRows


@dataclass(frozen=True)
class LateRows:
    """The packed rows and which of their tokens are read: U query branches first, then N passages."""

    rows: PackedRows
    num_queries: int
    query_tokens_Q: torch.Tensor  # the queries' own tokens, query by query
    query_index_UR: torch.Tensor  # into Q; 0 on padding
    weights_UR: torch.Tensor  # 1 / |I_q| on real rows, 0 on padding
    passage_index_NT: torch.Tensor  # into S; 0 on padding
    lengths_N: torch.Tensor
    place_of_token_S: torch.Tensor  # a passage token's place in the flattened [N, T]
    is_passage_S: torch.Tensor

    @property
    def position_ids_BS(self) -> torch.Tensor:
        """Position ids, as every layout has them."""
        return self.rows.position_ids_1S


@dataclass
class LateCapture(PackedSeqParams):
    """What one layer should keep (this rank's own numbering) and, after its forward, what it kept.

    A PackedSeqParams in "sbhd" format, as RowCapture: Megatron hands it through untouched.
    """

    qkv_format: str = "sbhd"
    layout: LateRows | None = None
    local_heads_by_layer: Mapping[int, Sequence[int]] = field(default_factory=dict)
    heads_per_group: int = 1
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def read(self, layer: int, query_BPSD: torch.Tensor, key_BGSD: torch.Tensor, scale: float) -> None:
        """Keep the query rows' scaled vectors [h, Q, D] and the keys [S, g, D] of this layer's heads, if any were
        asked for.
        """
        heads = self.local_heads_by_layer.get(layer)
        if heads is None:
            return
        assert self.layout is not None
        # keys once per group: heads of a group read the same ones
        groups = sorted({head // self.heads_per_group for head in heads})
        index = torch.tensor(list(heads), dtype=torch.long, device=query_BPSD.device)
        # the queries' rows only: those of passages are a hundred times as many, and nobody reads them
        vectors_hQD = query_BPSD[0].index_select(0, index).index_select(1, self.layout.query_tokens_Q) * scale
        self.rows[layer] = vectors_hQD, key_BGSD[0, groups].transpose(0, 1)


@dataclass
class CapturedKeys:
    """What a forward kept on this rank, layer by layer in ascending order; layers without heads here are present and
    empty.

    ``weight_delta`` [layers, heads on this rank] is what training has added to the readout's weights, None where they
    are fixed.
    """

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    weight_delta: torch.Tensor | None = None


@dataclass(frozen=True)
class RankReadout:
    """The part of a readout that lies on one rank: its heads in the order of the captured ones, with what belongs to
    them.
    """

    heads: tuple[Head, ...]  # Hugging Face numbers, by layer and head
    pair_of_head: tuple[int, ...]
    weights_K: torch.Tensor
    offsets_K: torch.Tensor | None
    floor: float
    first_head: int

    @classmethod
    def of(cls, heads: HeadSet, heads_on_rank: range, group_size: int, device: torch.device) -> RankReadout:
        """The heads of ``heads`` that live on this rank."""
        readout: Readout | None = heads.readout
        assert readout is not None and readout.kind == "log-mass"
        # in the order in which layers capture, with weights and offsets in the same one
        order = sorted(range(len(heads.heads)), key=lambda number: heads.heads[number])
        mine = [number for number in order if heads.heads[number][1] in heads_on_rank]
        local = tuple(heads.heads[number] for number in mine)

        def of_mine(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor([values[number] for number in mine], dtype=torch.float32, device=device)

        return cls(
            heads=local,
            pair_of_head=key_pairs(local, group_size)[1],
            weights_K=of_mine(readout.weights),
            offsets_K=of_mine(readout.offsets) if readout.offsets else None,
            floor=readout.floor,
            first_head=heads_on_rank.start,
        )

    def weights(self, delta: torch.Tensor | None) -> torch.Tensor:
        """w_h [K] of this rank's heads, with what training has added to them (``delta`` [layers, heads on this
        rank]).
        """
        if delta is None or not self.heads:
            return self.weights_K
        layers, heads = zip(*self.heads, strict=True)
        return self.weights_K + delta[list(layers), [head - self.first_head for head in heads]]

    def scores(
        self,
        captured: CapturedKeys,
        late: LateRows,
        lists: Sequence[tuple[int, int]] | None,
        meet: Callable[[QueryVectors], QueryVectors] = lambda queries: queries,
        num_queries: int | None = None,
    ) -> torch.Tensor:
        """This rank's part of scores_UN; with ``lists`` (first and last + 1 passage of each query) only of each query's
        own passages.

        ``meet`` may add the queries of other data-parallel ranks, ``num_queries`` is how many there are then.

        Trap: a rank without heads of a layer must still reach that layer in backward, where the other ranks wait in a
        collective. So everything captured takes part, also what is empty.
        """
        vectors_KQD = torch.cat([vectors for vectors, _ in captured.layers.values()]).float()
        keys_SAD = torch.cat([keys for _, keys in captured.layers.values()], dim=1)
        num_passages = len(late.lengths_N)
        if not self.heads:
            return (vectors_KQD.sum() + keys_SAD.sum()).float().expand(num_queries or late.num_queries, num_passages)
        queries = self._queries(vectors_KQD, keys_SAD[: late.rows.num_opening].transpose(0, 1), late)
        flat = _Take.apply(
            keys_SAD.flatten(1), late.passage_index_NT.flatten(), late.place_of_token_S, late.is_passage_S
        )
        keys_NATD = flat.view(*late.passage_index_NT.shape, *keys_SAD.shape[1:]).transpose(1, 2)
        weights_K = self.weights(captured.weight_delta)
        if lists is None:
            passages = PassageKeys(keys_NATD, late.lengths_N)
            return late_scores(meet(queries), passages, self.pair_of_head, weights_K, self.offsets_K, self.floor)
        blocks = []
        for query, (first, stop) in enumerate(lists):
            lengths = late.lengths_N[first:stop]
            one = QueryVectors(
                *(getattr(queries, name)[query : query + 1] for name in ("vectors_UKRD", "opening_UKR", "weights_UR"))
            )
            own = PassageKeys(keys_NATD[first:stop, :, : int(lengths.max())], lengths)
            blocks.append(late_scores(one, own, self.pair_of_head, weights_K, self.offsets_K, self.floor))
        # zeros elsewhere: a query's score of a foreign passage is not computed here, and no loss looks at it
        return torch.block_diag(*blocks)

    def _queries(self, vectors_KQD: torch.Tensor, opening_AOD: torch.Tensor, late: LateRows) -> QueryVectors:
        index_UR = late.query_index_UR
        vectors_KURD = vectors_KQD.index_select(1, index_UR.flatten()).unflatten(1, index_UR.shape)
        vectors_UKRD = vectors_KURD.transpose(0, 1)
        with torch.autocast(vectors_KQD.device.type, enabled=False):
            opening_UKR = opening_log_sums(vectors_UKRD, opening_AOD, self.pair_of_head)
        return QueryVectors(vectors_UKRD, opening_UKR, late.weights_UR)


class _Take(torch.autograd.Function):
    """values[index] where every token is taken at most once; backward is a gather, padding's gradient is dropped."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, is_taken: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse, is_taken)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        inverse, is_taken = ctx.saved_tensors
        return gradient.index_select(0, inverse).masked_fill_(~is_taken[:, None], 0), None, None, None
