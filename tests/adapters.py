"""Random PEFT adapters for tiny models, written by peft itself."""

from __future__ import annotations

from pathlib import Path

import torch

from headrank.lora_settings import PROJECTIONS


def make_tiny_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 3,
    alpha: float = 5.0,
    targets: tuple[str, ...] = tuple(PROJECTIONS),
    seed: int = 1,
) -> Path:
    """Adapt a model with peft, both factors random, and save it as peft does."""
    import transformers
    from peft import LoraConfig, get_peft_model

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder)
    return folder
