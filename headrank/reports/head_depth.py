"""Where the core heads sit: depth distribution, shared heads before and after training, and the paper's head table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrank.errors import InputError
from headrank.method.heads import Head, HeadSet, head_name


@dataclass(frozen=True)
class HeadDepth:
    """Depth of one head set: layers are zero-based, ``band`` is (shallowest, deepest)."""

    counts: tuple[int, ...]  # selected heads in each layer of the model
    band: tuple[int, int]
    mean_layer: float

    @property
    def layers_used(self) -> int:
        """l_max + 1: what early exit computes."""
        return self.band[1] + 1


def head_depth(heads: HeadSet) -> HeadDepth:
    """How many selected heads each layer holds, the band from the shallowest to the deepest, and the mean layer."""
    layers = [layer for layer, _ in heads.heads]
    counts = Counter(layers)
    return HeadDepth(
        tuple(counts[layer] for layer in range(heads.num_layers)), (min(layers), max(layers)), sum(layers) / len(layers)
    )


@dataclass(frozen=True)
class HeadChange:
    """Two head sets of the same architecture compared."""

    before: HeadSet
    after: HeadSet
    shared: tuple[Head, ...]  # in the order of ``after``

    def rows(self) -> list[tuple[int, str, str, bool]]:
        """(rank, before, after, is the *after* head of this rank also among the *before* heads); short sets leave
        ''.
        """
        length = max(len(self.before.heads), len(self.after.heads))
        names = [
            [head_name(heads.heads[place]) if place < len(heads.heads) else "" for place in range(length)]
            for heads in (self.before, self.after)
        ]
        is_shared = [
            place < len(self.after.heads) and self.after.heads[place] in self.shared for place in range(length)
        ]
        return [(place + 1, names[0][place], names[1][place], is_shared[place]) for place in range(length)]


def compare_heads(before: HeadSet, after: HeadSet) -> HeadChange:
    """Match two sets; sets of models with another shape are refused, their heads have nothing in common but numbers."""
    if (before.num_layers, before.num_heads) != (after.num_layers, after.num_heads):
        raise InputError(
            f"heads of {before.model} ({before.num_layers} layers, {before.num_heads} heads) and of {after.model} "
            f"({after.num_layers} layers, {after.num_heads} heads) cannot be compared; give two files of the same "
            "architecture"
        )
    earlier = set(before.heads)
    return HeadChange(before, after, tuple(head for head in after.heads if head in earlier))


def describe_change(change: HeadChange) -> list[str]:
    """What a person wants to know, in sentences: shared heads, depth bands, layers to compute."""
    before, after = head_depth(change.before), head_depth(change.after)
    direction = (
        "shallower"
        if after.mean_layer < before.mean_layer
        else "deeper"
        if after.mean_layer > before.mean_layer
        else "equally deep"
    )
    return [
        f"Shared heads: {len(change.shared)} of {len(change.after.heads)} ({_names(change.shared)}).",
        f"Depth band: layers {before.band[0]}-{before.band[1]} before, {after.band[0]}-{after.band[1]} after.",
        f"Mean layer: {before.mean_layer:.1f} before, {after.mean_layer:.1f} after ({direction}).",
        f"Layers computed: {before.layers_used} of {len(before.counts)} before, {after.layers_used} of "
        f"{len(after.counts)} after.",
    ]


def _names(heads: Sequence[Head]) -> str:
    return ", ".join(map(head_name, heads)) or "none"
