"""Attention of short rows by plain products: the same numbers and gradients as torch's fused kernel."""

import pytest
import torch

from headrank.method.attention import causal_context
from megatron_patches import packed_rows


def _inputs(length, dtype):
    generator = torch.Generator().manual_seed(length)
    shapes = ((3, 6, length, 8), (3, 2, length, 8), (3, 2, length, 8))  # three heads read each key
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_context_and_gradients_are_those_of_the_fused_kernel(length, dtype, tolerance):
    results = []
    for attend in (packed_rows._short_context, causal_context):
        tensors = _inputs(length, dtype)
        context = attend(*tensors, 0.3)
        context.float().pow(2).sum().backward()
        results.append([context.detach().float(), *(tensor.grad.float() for tensor in tensors)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1e-3)


def test_a_row_sees_nothing_behind_itself():
    query, key, value = (tensor.detach() for tensor in _inputs(9, torch.float32))
    before = packed_rows._short_context(query, key, value, 0.3)
    key[:, :, 5:] = 7.0
    value[:, :, 5:] = -3.0
    after = packed_rows._short_context(query, key, value, 0.3)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.equal(before[:, :, 5:], after[:, :, 5:])


def test_only_short_bfloat16_rows_on_a_cpu_take_it():
    short = torch.zeros(1, 2, 4, 8)
    assert packed_rows._is_short_on_cpu(short.bfloat16())
    assert not packed_rows._is_short_on_cpu(short)
    assert not packed_rows._is_short_on_cpu(torch.zeros(1, 1, packed_rows._SHORT + 1, 8, dtype=torch.bfloat16))
