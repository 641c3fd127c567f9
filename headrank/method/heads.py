"""Core heads: the HeadSet every command shares, its heads.json, and the head scores of Eq. 2-4.

Shapes: L layers, H heads, N documents. Heads are always (layer, head) pairs, zero-based, numbered as in Hugging Face;
for people they are written L11-H2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrank.errors import InputError
from headrank.formats import read_json, write_json
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout

FORMAT = "headrank-heads/1"  # the paper's score: masses with equal weights
READOUT_FORMAT = "headrank-heads/2"  # with a readout; a headrank that knows only /1 refuses it
Head = tuple[int, int]  # (layer, head)


def head_name(head: Head) -> str:
    """L11-H2 for (11, 2), as the paper writes it."""
    return f"L{head[0]}-H{head[1]}"


@dataclass(frozen=True)
class HeadSet:
    """The selected heads, best first, and what they were computed from.

    ``table`` ranks all heads with the selection's columns; ``settings`` and ``source`` are free-form facts
    (temperature, collection, versions) that make the file explain itself. ``readout`` says how the heads become a
    score; None is the paper's sum of calibrated masses with equal weights, written in the old format.
    """

    heads: tuple[Head, ...]
    method: str
    model: str
    num_layers: int
    num_heads: int
    prompt: PromptTemplate = field(default_factory=PromptTemplate)
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    table: tuple[Mapping[str, Any], ...] = ()
    readout: Readout | None = None

    def __post_init__(self) -> None:
        if not self.heads:
            raise InputError("heads: the list is empty; select at least one head")
        if len(set(self.heads)) != len(self.heads):
            raise InputError("heads: the same head appears twice")
        self.check_fits(self.num_layers, self.num_heads)
        if self.readout is not None:
            self.readout.check_count(len(self.heads))
        if self.prompt.is_late and (self.readout is None or self.readout.kind != "log-mass"):
            raise InputError(
                "heads: the late layout needs a log-mass readout; make one with 'headrank select-heads --method "
                "readout'"
            )

    @property
    def l_max(self) -> int:
        """The deepest selected layer, where inference stops."""
        return max(layer for layer, _ in self.heads)

    @classmethod
    def all_heads(cls, num_layers: int, num_heads: int, *, model: str, prompt: PromptTemplate | None = None) -> HeadSet:
        """Every head of the model: what ICR reads."""
        heads = tuple((layer, head) for layer in range(num_layers) for head in range(num_heads))
        return cls(heads, "icr", model, num_layers, num_heads, prompt or PromptTemplate())

    def check_fits(self, num_layers: int, num_heads: int, name: str = "the model") -> None:
        """Raise InputError when a head lies outside a model of this size."""
        for layer, head in self.heads:
            if not (0 <= layer < num_layers and 0 <= head < num_heads):
                raise InputError(
                    f"head {head_name((layer, head))} does not exist in {name} ({num_layers} layers, {num_heads} "
                    "heads); "
                    "these heads were selected on another model: run 'headrank select-heads' on this one"
                )

    def by_layer(self) -> dict[int, list[int]]:
        """Layer -> its selected heads in ascending order."""
        layers: dict[int, list[int]] = {}
        # ascending: sums of float32 depend on their order, and the same heads from another file must give the same bits
        for layer, head in sorted(self.heads):
            layers.setdefault(layer, []).append(head)
        return layers

    def to_dict(self) -> dict[str, Any]:
        """The heads.json document."""
        return {
            "format": FORMAT if self.readout is None else READOUT_FORMAT,
            "method": self.method,
            "model": self.model,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "top_k": len(self.heads),
            "l_max": self.l_max,
            "heads": [list(head) for head in self.heads],
            "names": [head_name(head) for head in self.heads],
            "prompt": self.prompt.to_dict(),
            "prompt_hash": self.prompt.hash,
            "settings": dict(self.settings),
            "source": dict(self.source),
            "table": [dict(row) for row in self.table],
            **({} if self.readout is None else {"readout": self.readout.to_dict()}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write heads.json atomically; the same set gives the same bytes."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadSet:
        """Read and check heads.json; every violation names the file and the field."""
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") not in (FORMAT, READOUT_FORMAT):
            raise InputError(f"{path}: not a {FORMAT} or {READOUT_FORMAT} file; make one with 'headrank select-heads'")
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Any) -> HeadSet:
        """The inverse of ``to_dict`` with every field checked."""
        if not isinstance(values, Mapping):
            raise InputError(f"the heads must be an object, found {values!r}")

        def of_type(key: str, kind: type) -> Any:
            value = values.get(key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InputError(f"field {key!r} must be a {kind.__name__}, found {value!r}")
            return value

        heads = of_type("heads", list)
        for head in heads:
            if not (isinstance(head, list) and len(head) == 2 and all(type(number) is int for number in head)):
                raise InputError(f"field 'heads' must hold [layer, head] pairs, found {head!r}")
        table = of_type("table", list)
        for row in table:
            if not isinstance(row, Mapping):
                raise InputError(f"field 'table' must hold objects, found {row!r}")
        result = cls(
            heads=tuple((layer, head) for layer, head in heads),
            method=of_type("method", str),
            model=of_type("model", str),
            num_layers=of_type("num_layers", int),
            num_heads=of_type("num_heads", int),
            prompt=PromptTemplate.from_dict(of_type("prompt", dict)),
            settings=of_type("settings", dict),
            source=of_type("source", dict),
            table=tuple(table),
            readout=Readout.from_dict(values["readout"]) if "readout" in values else None,
        )
        if values.get("format", FORMAT) == READOUT_FORMAT and result.readout is None:
            raise InputError(f"a {READOUT_FORMAT} file needs the field 'readout'")
        if values.get("prompt_hash") != result.prompt.hash:
            raise InputError(
                f"field 'prompt_hash' is {values.get('prompt_hash')!r} but the prompt hashes to {result.prompt.hash!r}"
            )
        if values.get("l_max") != result.l_max:
            raise InputError(
                f"field 'l_max' is {values.get('l_max')!r} but the deepest head is in layer {result.l_max}"
            )
        return result


def discriminability(
    masses_LHN: torch.Tensor, positive: int, negatives: Sequence[int], temperature: float
) -> torch.Tensor:
    """S_disc of Eq. 2 for one chosen document: softmax(alpha / tau) of the positive against its negatives, [L, H]."""
    # float64: at tau 0.001 the exponents are thousands
    columns = masses_LHN[..., [positive, *negatives]].double() / temperature
    return columns.softmax(dim=-1)[..., 0]


def entropy_gate(entropy_LH: torch.Tensor, sequence_length: int, weight: float) -> torch.Tensor:
    """G_ent of Eq. 3: 1 - lambda H / log L_seq, [L, H]."""
    return 1.0 - weight * entropy_LH.double() / torch.log(torch.tensor(float(sequence_length), dtype=torch.float64))


def top_heads(scores_LH: torch.Tensor, top_k: int) -> tuple[Head, ...]:
    """The K heads with the highest score, best first; ties go to the lower layer, then the lower head."""
    num_layers, num_heads = scores_LH.shape
    ranked = sorted(
        ((layer, head) for layer in range(num_layers) for head in range(num_heads)),
        # the pair itself breaks ties: topk() is free to return equal scores in any order, and the file must be the same
        # on every machine
        key=lambda pair: (-float(scores_LH[pair]), pair),
    )
    if not 1 <= top_k <= len(ranked):
        raise InputError(f"`top_k` {top_k} is not between 1 and the model's {len(ranked)} heads")
    return tuple(ranked[:top_k])
