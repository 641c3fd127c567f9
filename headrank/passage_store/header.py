"""What a store holds and whose keys they are: store.json, written once when the store is made. No torch in here.

A store belongs to a model, an adapter, a tokenizer and the part of the prompt that stands before a passage. What a
query looks like (instruction, readout, weights of heads) does not enter a passage's keys, so that any readout on a
subset of the pairs is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headrank.artifacts import content_digest, fingerprint, sampled_digest
from headrank.errors import InputError
from headrank.files import read_json, write_json
from headrank.method.prompt import PromptTemplate
from headrank.reranking.model_sources import base_of

FORMAT = "headrank-store/1"
HEADER_FILE = "store.json"
ITEM_BYTES = {"int8": 1, "bf16": 2, "fp32": 4}
POOLS = (1, 2, 4)
# fields of the prompt that decide a passage's tokens, positions or what stands before it
_OF_PASSAGES = ("opening", "use_chat_template", "max_words", "branch_position", "document_layout")
KeyPair = tuple[int, int]


@dataclass(frozen=True)
class KeyIdentity:
    """Everything that decides a passage's keys. ``model`` is a name for people and decides nothing."""

    model: str
    weights: str
    adapter: str
    tokenizer: str
    prompt: Mapping[str, Any]
    head_size: int

    @classmethod
    def of(cls, model: str | Path, prompt: PromptTemplate, head_size: int) -> KeyIdentity:
        """The identity of a local model's keys, wherever its folders lie; a name on the hub stands for its files."""
        root, base = Path(model), Path(base_of(model))
        weights = sorted(path for path in base.glob("*.safetensors") if not path.name.startswith("adapter"))
        adapter = sorted(root.glob("adapter*"))
        tokenizer = base / "tokenizer.json"
        values = prompt.to_dict()
        name = base.name if base.is_dir() else str(base)
        return cls(
            model=name if root == base else f"{name} with {root.name}",
            weights=sampled_digest(weights, base) if weights else str(base),
            adapter=sampled_digest(adapter, root) if adapter else "none",
            tokenizer=content_digest(tokenizer) if tokenizer.is_file() else str(base),
            prompt={name: values[name] for name in _OF_PASSAGES},
            head_size=head_size,
        )

    def difference(self, other: KeyIdentity) -> str | None:
        """The first reason in words why keys of ``other`` are not these; None where they are."""
        reasons = {
            "weights": f"the weights of {other.model} ({other.weights}) are not those of {self.model} ({self.weights})",
            "adapter": f"the adapter differs ({other.adapter}, the store was made with {self.adapter})",
            "tokenizer": f"the tokenizer differs ({other.tokenizer}, the store was made with {self.tokenizer})",
            "head_size": f"the head size is {other.head_size}, the store's {self.head_size}",
        }
        for name, reason in reasons.items():
            if getattr(self, name) != getattr(other, name):
                return reason
        for name in _OF_PASSAGES:
            if self.prompt.get(name) != other.prompt.get(name):
                return (
                    f"the prompt's {name} is {other.prompt.get(name)!r}, the store was made with "
                    f"{self.prompt.get(name)!r}"
                )
        return None


@dataclass(frozen=True)
class StoreHeader:
    """The contents of store.json: identity, pairs and number format; fixed for the life of a store.

    Keys are kept as pairs x tokens x head size, pair by pair. ``pool`` neighbouring tokens share one mean key.
    ``computed_in`` is the number format of the model's forward that made the first keys, for people.
    """

    identity: KeyIdentity
    pairs: tuple[KeyPair, ...]
    dtype: str
    pool: int = 1
    computed_in: str = ""
    scales: str = ""  # digest of the file of scales and centres
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"dtype {self.dtype!r} of a store is not one of {', '.join(ITEM_BYTES)}")
        if self.pool not in POOLS:
            raise InputError(f"pool {self.pool!r} of a store is not one of {', '.join(map(str, POOLS))}")
        if not self.pairs or list(self.pairs) != sorted(set(self.pairs)):
            raise InputError("the (layer, group) pairs of a store must be sorted, each once, and at least one")

    @property
    def bytes_per_key(self) -> int:
        """Bytes of one stored token: pairs x head size x bytes of a number."""
        return len(self.pairs) * self.identity.head_size * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of text; pooling divides it."""
        return self.bytes_per_key / self.pool

    def check_serves(self, identity: KeyIdentity, pairs: Iterable[KeyPair], place: str | Path) -> None:
        """Raise InputError, with the reason, unless keys of ``identity`` at ``pairs`` are here."""
        reason = self.identity.difference(identity)
        missing = [pair for pair in pairs if pair not in set(self.pairs)]
        if reason is None and missing:
            names = ", ".join(f"layer {layer} group {group}" for layer, group in missing[:3])
            reason = (
                f"the readout reads {names}{' and more' if len(missing) > 3 else ''}, which the store does not hold"
            )
        if reason is not None:
            raise InputError(
                f"{place}: this store cannot serve this reranker: {reason}; make one with 'headrank index'"
            )

    def places(self, pairs: Sequence[KeyPair]) -> list[int]:
        """Where ``pairs`` stand among the stored ones."""
        order = {pair: place for place, pair in enumerate(self.pairs)}
        return [order[pair] for pair in pairs]

    def write(self, folder: Path) -> None:
        """Write store.json atomically."""
        values = asdict(self) | {"pairs": [list(pair) for pair in self.pairs]}
        write_json(folder / HEADER_FILE, {"format": FORMAT, **values, "digest": fingerprint(values)})

    @classmethod
    def read(cls, folder: str | Path) -> StoreHeader:
        """Read and check store.json."""
        path = Path(folder) / HEADER_FILE
        if not path.is_file():
            raise InputError(
                f"{folder}: no passage store there ({HEADER_FILE} is missing); make one with 'headrank index "
                "--store DIR'"
            )
        values = read_json(path)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise InputError(f"{path}: not a {FORMAT} file; was this store written by another headrank?")
        if values.pop("digest", None) != fingerprint(values):
            raise InputError(f"{path}: was changed after the store was made; restore the file or index again")
        names = {item.name for item in fields(cls)}
        values = {name: value for name, value in values.items() if name in names}
        return cls(
            **values
            | {"identity": KeyIdentity(**values["identity"]), "pairs": tuple((a, b) for a, b in values["pairs"])}
        )
