"""Models the planner knows by name, without weights or network, and the core heads it assumes for them."""

from __future__ import annotations

from pathlib import Path

from headrank.errors import InputError
from headrank.method.heads import Head, HeadSet
from megatron_patches.shape import ModelShape

# l_max over the last layer where no heads are known; the paper's Qwen3 models lie at 0.78, 0.70 and 0.69
USUAL_DEPTH = 0.7


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, is_tied: bool) -> ModelShape:
    """A dense Qwen3 as published: 8 key-value groups of size 128, vocabulary 151,936, rotary base 1e6, context
    40,960.
    """
    return ModelShape(
        family="qwen3",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=8,
        head_dim=128,
        vocab=151936,
        rotary_base=1e6,
        eps=1e-6,
        is_tied=is_tied,
        has_qk_norm=True,
        has_qkv_bias=False,
        max_positions=40960,
    )


KNOWN_MODELS: dict[str, ModelShape] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, is_tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, is_tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, is_tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, is_tied=False),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, is_tied=False),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, is_tied=False),
    "Qwen3-30B-A3B": ModelShape(
        family="qwen3_moe",
        layers=48,
        hidden=2048,
        ffn=6144,
        heads=32,
        groups=4,
        head_dim=128,
        vocab=151936,
        rotary_base=1e6,
        eps=1e-6,
        is_tied=False,
        has_qk_norm=True,
        has_qkv_bias=False,
        max_positions=40960,
        experts=128,
        experts_per_token=8,
        expert_ffn=768,
    ),
    "embedded": ModelShape(
        family="llama",
        layers=30,
        hidden=576,
        ffn=1536,
        heads=9,
        groups=3,
        head_dim=64,
        vocab=49152,
        rotary_base=1e5,
        eps=1e-5,
        is_tied=True,
        has_qk_norm=False,
        has_qkv_bias=False,
        max_positions=8192,
    ),
}

# The paper's heads before training (its head table), which are the ones the first round trains.
PAPER_HEADS: dict[str, tuple[Head, ...]] = {
    "Qwen3-0.6B": ((11, 2), (11, 3), (16, 7), (21, 9), (21, 8), (6, 7), (17, 12), (13, 14)),
    "Qwen3-1.7B": ((14, 14), (11, 2), (11, 3), (13, 14), (14, 6), (16, 14), (16, 13), (19, 5)),
    "Qwen3-4B": ((21, 8), (21, 10), (22, 4), (23, 10), (24, 29), (21, 11), (20, 16), (20, 15)),
}


def shape_of(model: str) -> ModelShape:
    """The shape of a known name (in any case, with or without 'Qwen/'), else of a Hugging Face directory."""
    wanted = model.lower().removeprefix("qwen/")
    for name, shape in KNOWN_MODELS.items():
        if name.lower() == wanted:
            return shape
    if Path(model).is_dir():
        return ModelShape.from_hf(model)
    raise InputError(f"model {model!r} is neither a directory with config.json nor one of {', '.join(KNOWN_MODELS)}")


def heads_of(model: str, shape: ModelShape, last_layer: int | None = None, num_heads: int = 8) -> HeadSet:
    """The paper's heads where it gives them, else ``num_heads`` spread over the upper half of the layers up to l_max.

    ``last_layer`` moves the deepest head there. Which heads they are hardly matters to the cost; where the deepest lies
    does.
    """
    known = next(
        (heads for name, heads in PAPER_HEADS.items() if name.lower() == model.lower().removeprefix("qwen/")), None
    )
    if known is None or last_layer is not None or num_heads != len(known):
        deepest = round(USUAL_DEPTH * (shape.layers - 1)) if last_layer is None else last_layer
        if not 0 <= deepest < shape.layers:
            raise InputError(f"`l_max` {deepest} is not a layer of {model}, which has layers 0 to {shape.layers - 1}")
        known = _spread(shape, deepest, num_heads)
    return HeadSet(known, "planner", model, shape.layers, shape.heads)


def _spread(shape: ModelShape, deepest: int, num_heads: int) -> tuple[Head, ...]:
    """Heads in distinct places: layers from l_max down to half of it, head numbers evenly over the ranks."""
    layers = range(deepest, max(0, deepest // 2) - 1, -1)
    places = [
        (layer, (step * shape.heads // max(1, num_heads) + turn) % shape.heads)
        for turn in range(shape.heads)
        for step, layer in enumerate(layers)
    ]
    distinct = list(dict.fromkeys(places))[:num_heads]
    if len(distinct) < num_heads:
        raise InputError(f"`num_core_heads` {num_heads} is more than layers 0 to {deepest} hold here; lower it")
    return tuple(distinct)
