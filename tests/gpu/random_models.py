"""Models of the true sizes with random weights, written as Hugging Face directories: speed and memory do not ask
what a weight is.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from headrank.method.heads import HeadSet
from megatron_patches.checkpoints.safetensors_files import plan_shards, shard_file_names, write_index
from megatron_patches.checkpoints.weights import mapping_of, megatron_names, source_shape
from megatron_patches.planner.shapes import heads_of, shape_of
from megatron_patches.shape import ModelShape
from tests.tiny_models import tiny_tokenizer

SHARD = 2 * 10**9


def write_random_model(folder: Path, name: str, *, seed: int = 0) -> tuple[Path, Path]:
    """The directory of a model of this name in the planner's table, and its heads.json (the paper's heads).

    Norms of Q and K are between 1 and 2: with them at 1 random attention is flat, and scores are rounding.
    """
    shape = shape_of(name)
    heads = heads_of(name, shape)
    folder.mkdir(parents=True)
    _config(shape).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    HeadSet(heads.heads, "headrank", str(folder), shape.layers, shape.heads).save(folder / "heads.json")
    write_random_weights(folder, shape, seed)
    return folder, folder / "heads.json"


def write_random_weights(folder: Path, shape: ModelShape, seed: int) -> None:
    """safetensors in bfloat16, a few files of two gigabytes."""
    names = list(dict.fromkeys(source for name in megatron_names(shape) for source in mapping_of(name).sources))
    sizes = {name: 2 * torch.Size(source_shape(shape, name)).numel() for name in names}
    shards = plan_shards(sizes, SHARD)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(seed)

    def drawn(name: str) -> torch.Tensor:
        made = torch.empty(source_shape(shape, name), dtype=torch.bfloat16, device=where)
        if name.endswith("norm.weight"):
            is_sharp = "q_norm" in name or "k_norm" in name
            return made.uniform_(*((1.0, 2.0) if is_sharp else (0.5, 1.5)), generator=generator).cpu()
        return made.normal_(0.0, 0.02, generator=generator).cpu()

    for shard, file in zip(shards, shard_file_names(len(shards)), strict=True):
        save_file({name: drawn(name) for name in shard}, folder / file, metadata={"format": "pt"})
    write_index(folder, shards, sizes)


def _config(shape: ModelShape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.eps,
        rope_theta=shape.rotary_base,
        tie_word_embeddings=shape.is_tied,
        dtype="bfloat16",
    )
