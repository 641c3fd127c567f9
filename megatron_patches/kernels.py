"""Which kernels a run uses where there is a choice: attention's backend, deterministic ones, fused ones, overlapped
collectives.

All of it is Megatron's own settings under Megatron's own flags; here is decided when they can be on.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from headrank.errors import InputError
from megatron_patches import device

if TYPE_CHECKING:
    from megatron_patches.training.config import TrainingConfig

LENGTH_STEP = 64  # fused attention prepares itself anew for every length it meets, and prefers multiples of its tiles
_OTHER_BRANCH = 128  # tokens; the calibration branch of the longest template has some forty
_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# what makes an answer of theirs the same every time; NCCL_ALGO is Megatron's list
_ALLOWED = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}


def choose_attention(backend: str) -> None:
    """Let Transformer Engine and torch take this backend only; 'auto' leaves the choice to them. Before the first
    attention.

    Transformer Engine reads its environment. torch calls the same kernels flash, cuDNN and math. 'local' is torch's
    attention, never Transformer Engine's.
    """
    if backend in ("auto", "local"):
        return
    for name, wanted in (("NVTE_FLASH_ATTN", "flash"), ("NVTE_FUSED_ATTN", "fused"), ("NVTE_UNFUSED_ATTN", "unfused")):
        value = str(int(backend == wanted))
        if os.environ.get(name, value) != value:
            raise InputError(f"--attention-backend {backend}: the environment says {name}={os.environ[name]}; unset it")
        os.environ[name] = value
    if device.has_cuda():
        torch.backends.cuda.enable_flash_sdp(backend == "flash")
        torch.backends.cuda.enable_cudnn_sdp(backend == "fused")
        # math must stay for what has a mask or is float32: flash has neither
        torch.backends.cuda.enable_math_sdp(True)


def make_deterministic() -> None:
    """Only kernels that give the same bits every time; an environment that contradicts is refused. Before CUDA
    starts.
    """
    for name, value in _DETERMINISTIC.items():
        found = os.environ.setdefault(name, value)
        if found not in _ALLOWED[name]:
            raise InputError(
                f"--deterministic-mode: the environment says {name}={found}; unset it, or set it to {value}"
            )
    torch.use_deterministic_algorithms(True)


def fuses_rotary(micro_batch_size: int, use_engine: bool) -> bool:
    """Transformer Engine's rotary kernel takes one row of angles for the whole batch.

    Positions restart in the calibration branch, which lies elsewhere in every context: one context a batch, then.
    """
    from megatron.core.models.common.embeddings import rope_utils

    return use_engine and micro_batch_size == 1 and rope_utils.fused_apply_rotary_pos_emb is not None


def fuses_gradient_accumulation(use_engine: bool) -> bool:
    """Transformer Engine adds a weight's gradient to the float32 buffer in the product itself; apex's extension does
    so for Megatron's.
    """
    return use_engine or (device.has_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None)


def prepare_kernels(config: TrainingConfig) -> None:
    """What must be said before CUDA, NCCL and Transformer Engine start."""
    choose_attention(config.attention_backend)
    if config.deterministic_mode:
        make_deterministic()


def one_length(config: TrainingConfig) -> int:
    """What every batch is padded to with --tp-comm-overlap: --seq-length bounds one branch, and the other comes on
    top.
    """
    assert config.seq_length is not None, "checked with the flags"
    step = math.lcm(config.tensor_parallel, LENGTH_STEP)
    return -(-(config.seq_length + _OTHER_BRANCH) // step) * step


def start_overlap(config: TrainingConfig, hidden: int) -> None:
    """Transformer Engine's buffers for --tp-comm-overlap; their shape is fixed, so every batch has that length."""
    from transformer_engine.pytorch import module

    module.base.initialize_ub(
        shape=[one_length(config) * config.micro_batch_size, hidden],
        tp_size=config.tensor_parallel,
        quantization_modes=[module.base.UserBufferQuantizationMode.NONE],
        bootstrap_backend="nccl" if device.has_cuda() else "gloo",
    )


def kernel_settings(settings: TrainingConfig, *, use_engine: bool) -> dict[str, Any]:
    """Megatron's configuration of all this, from a TrainingConfig."""
    from megatron.core.transformer.enums import AttnBackend

    chosen: dict[str, Any] = {
        "attention_backend": AttnBackend[settings.attention_backend],
        "deterministic_mode": settings.deterministic_mode,
        "apply_rope_fusion": settings.rope_fusion and fuses_rotary(settings.micro_batch_size, use_engine),
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion
        and fuses_gradient_accumulation(use_engine),
        "tp_comm_overlap": settings.tp_comm_overlap,
    }
    if settings.fp8_format is not None:
        chosen |= {"fp8": settings.fp8_format, "fp8_recipe": settings.fp8_recipe}
    return chosen
