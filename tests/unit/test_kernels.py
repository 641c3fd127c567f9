"""Which kernels a run asks for: the environment that Transformer Engine and NCCL read, one length for overlapped
collectives, fusions.
"""

from __future__ import annotations

import os
import sys
import types
from types import SimpleNamespace

import pytest

from headrank.errors import InputError
from megatron_patches import kernels

NAMES = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NCCL_ALGO",
    "CUBLAS_WORKSPACE_CONFIG",
)


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def chosen() -> str:
    return "".join(os.environ.get(name, "-") for name in NAMES[:3])


@pytest.mark.parametrize(
    ("backend", "expected"), [("flash", "100"), ("fused", "010"), ("unfused", "001"), ("auto", "---"), ("local", "---")]
)
def test_a_backend_is_the_only_one_that_transformer_engine_may_take(clean, backend, expected) -> None:
    kernels.choose_attention(backend)
    assert chosen() == expected


def test_a_backend_that_the_environment_forbids_is_refused(clean) -> None:
    clean.setenv("NVTE_FUSED_ATTN", "1")
    with pytest.raises(InputError, match="--attention-backend flash: the environment says NVTE_FUSED_ATTN=1"):
        kernels.choose_attention("flash")


def test_deterministic_kernels_are_asked_of_everyone(clean) -> None:
    asked = []
    clean.setattr("torch.use_deterministic_algorithms", asked.append)
    clean.setenv("NCCL_ALGO", "Tree")
    kernels.make_deterministic()
    assert asked == [True]
    assert [os.environ[name] for name in NAMES[3:]] == ["0", "Tree", ":4096:8"]
    clean.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(InputError, match="--deterministic-mode: the environment says NCCL_ALGO=NVLS"):
        kernels.make_deterministic()


def test_overlapped_collectives_have_buffers_of_the_length_that_every_batch_gets(monkeypatch) -> None:
    from megatron_patches.training.batches import length_multiple

    asked = {}
    base = SimpleNamespace(
        initialize_ub=lambda **how: asked.update(how), UserBufferQuantizationMode=SimpleNamespace(NONE="none")
    )
    engine = types.ModuleType("transformer_engine.pytorch")
    engine.module = SimpleNamespace(base=base)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    config = SimpleNamespace(seq_length=8000, micro_batch_size=2, tensor_parallel=8)
    kernels.start_overlap(config, hidden=2560)
    length = kernels.one_length(config)
    assert asked["shape"] == [2 * length, 2560] and asked["tp_size"] == 8
    assert length >= 8000 + 128 and length % 64 == 0
    assert length_multiple(SimpleNamespace(tp_comm_overlap=True, fixed_length=length)) == length


@pytest.mark.parametrize(
    ("size", "engine", "there", "expected"),
    [(1, True, True, True), (2, True, True, False), (1, False, True, False), (1, True, False, False)],
)
def test_the_rotary_kernel_is_taken_for_one_context_a_batch(monkeypatch, size, engine, there, expected) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object() if there else None)
    assert kernels.fuses_rotary(size, engine) is expected


def test_gradients_are_added_in_the_product_where_somebody_can() -> None:
    assert kernels.fuses_gradient_accumulation(use_engine=True)
    assert not kernels.fuses_gradient_accumulation(use_engine=False), "a CPU has no such kernel"
