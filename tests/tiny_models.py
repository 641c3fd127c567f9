"""Tiny random models of every family with a small real tokenizer, made by code: nothing binary is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "Please find information that are relevant to the following query in the paragraphs above.",
    "Here are some paragraphs: The flea lives for about two to three months and needs a warm host to complete its "
    "life cycle.",
    "Concrete floors cost between two and six dollars a square foot; rosin makes the bow grip the string of a violin.",
    "user assistant system query relevant document passage rank the most of in and to a is for on with as by at from",
]
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 96}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "sliding_window": 96,
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25}),
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
WITH_EXPERTS = {"qwen3_moe": ("Qwen3Moe", {"num_key_value_heads": 4, "head_dim": 16, **_EXPERTS})}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 400 entries with ChatML control tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = _CHATML
    return fast


def tiny_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The configuration of one family at toy size; ``changes`` override."""
    prefix, extra = {**FAMILIES, **WITH_EXPERTS}[family]
    values = {
        **SIZES,
        "vocab_size": 416,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **extra,
        **changes,
    }
    return getattr(transformers, f"{prefix}Config")(**values)


def make_tiny_model(
    directory: Path, family: str = "qwen3", *, seed: int = 0, std: float = 0.12, **changes: Any
) -> Path:
    """Write a random model of the family (norm weights not one, attention not flat) and the tokenizer as an HF
    directory.
    """
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    name = {**FAMILIES, **WITH_EXPERTS}[family][0].removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in key and key.endswith("weight"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, std)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def make_tiny_colbert(directory: Path) -> Path:
    """A random checkpoint in ColBERTv2's own layout: a BERT encoder, linear.weight at the root, artifact.metadata."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789?."
    words = [
        "[PAD]",
        "[unused0]",
        "[unused1]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 4), ("[SEP]", 5)]
    )
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    transformers.BertTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
    )
    model = transformers.BertModel(config)
    config.architectures = ["HF_ColBERT"]
    config.save_pretrained(directory)
    weights = {f"bert.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file(
        weights | {"linear.weight": torch.randn(16, 32)}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    (directory / "artifact.metadata").write_text('{"query_maxlen": 16, "doc_maxlen": 48}')
    return directory
