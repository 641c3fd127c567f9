"""The model card of an exported reranker: what it is, how to use it, how it was made. Plain text functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrank.method.heads import HeadSet, head_name

_SNIPPET = """```python
from headrank import HeadRankReranker

reranker = HeadRankReranker.from_pretrained("{name}")
for hit in reranker.rank("how long do fleas live", ["Fleas live two to three months.", "Rosin is made from resin."]):
    print(hit["corpus_id"], hit["score"])
```"""


def model_card(
    name: str,
    base_model: str,
    heads: HeadSet,
    *,
    is_truncated: bool = False,
    is_adapter: bool = False,
    training: Mapping[str, Any],
    license_name: str | None = None,
    num_bytes: int | None = None,
) -> str:
    """README.md with the hub's metadata block. Only facts that were handed in are stated; no measure is claimed."""
    block = ["---", "pipeline_tag: text-ranking", "library_name: headrank", f"base_model: {base_model}"]
    block += ["base_model_relation: adapter"] if is_adapter else []
    block += [f"license: {license_name}"] if license_name else []
    block += ["tags:", "- reranking", "- attention", "- headrank", *(["- lora", "- peft"] if is_adapter else []), "---"]
    depth = f"{heads.l_max + 1} of {heads.num_layers} layers"
    if is_adapter:
        kind = (
            f"This directory holds a LoRA adapter for {base_model}, which is needed beside it; reranking uses {depth}. "
            "`HeadRankReranker` merges it at load and needs no peft; peft and transformers load it as any other "
            "adapter."
        )
    elif is_truncated:
        kind = f"This directory holds only the {depth} that reranking reads; it cannot generate text."
    else:
        kind = (
            f"All {heads.num_layers} layers are here, so it also loads with plain `AutoModelForCausalLM`; reranking "
            f"uses {depth}."
        )
    names = ", ".join(head_name(head) for head in heads.heads)
    parts = [
        "\n".join(block),
        f"# {name}",
        "A reranker that reads relevance from attention: one truncated prefill pass, no decoding. "
        f"{_score(heads, base_model)}",
        kind,
        "## Usage",
        _SNIPPET.format(name=name),
        "A local path works too. The heads and the prompt they were chosen under are in `headrank.json`.",
        "## Heads",
        f"{names} (layer and head from zero, selected by `{heads.method}`; prompt hash `{heads.prompt.hash}`).",
        "## Training",
        _facts(training, num_bytes),
    ]
    return "\n\n".join(parts) + "\n"


def _score(heads: HeadSet, base_model: str) -> str:
    """What the score of a passage is."""
    where = f"{len(heads.heads)} heads of {base_model}"
    if heads.readout is not None and heads.readout.kind == "log-mass":
        text = (
            "It scores a passage by the logarithm of the attention that each token of the query pays to it, a "
            f"weighted sum over {where}."
        )
    else:
        text = f"It scores a passage by the attention its tokens get from the query in {where}, "
        text += 'minus what they get from the content-free query "N/A".'
    if heads.prompt.is_late:
        text += (
            " The query reads no passage: a score depends on the query and that passage alone, and passages can be "
            "kept in a store."
        )
    elif heads.prompt.is_parallel:
        text += " It uses the parallel layout: scores do not depend on candidate order."
    return text


def _facts(training: Mapping[str, Any], num_bytes: int | None) -> str:
    """A table of the plain facts; nested ones keep their path as name."""
    rows = list(_flatten(training)) + ([("weights on disk, bytes", num_bytes)] if num_bytes else [])
    if not rows:
        return "No training facts were stored with the checkpoint."
    lines = ["| | |", "|---|---|"] + [f"| {key} | {_cell(value)} |" for key, value in rows]
    return "\n".join(lines)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{path}.")
        elif value is not None and not isinstance(value, (list, tuple)):
            rows.append((path, value))
    return rows


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
