"""Our SwiGLU: values and gradients of the plain formula, a hand-computed example, and what it keeps for backward."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from megatron_patches.gated_unit import GatedUnit

CONFIG = SimpleNamespace(
    gated_linear_unit=True, activation_func=silu, activation_func_clamp_value=None, glu_linear_offset=0.0
)


def plain(both: torch.Tensor) -> torch.Tensor:
    gate, linear = both.chunk(2, dim=-1)
    return silu(gate) * linear


def test_values_and_gradients_are_those_of_the_formula() -> None:
    both = torch.randn(5, 2, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    unit = GatedUnit(CONFIG)
    torch.testing.assert_close(unit(both), plain(both))
    weight = torch.linspace(-1, 1, 70, dtype=torch.float64).view(5, 2, 7)
    (mine,) = torch.autograd.grad((unit(both) * weight).sum(), both)
    (expected,) = torch.autograd.grad((plain(both) * weight).sum(), both)
    torch.testing.assert_close(mine, expected)
    assert torch.autograd.gradcheck(unit, both)


def test_by_hand() -> None:
    both = torch.tensor([[1.0, 3.0]], requires_grad=True)
    value = GatedUnit(CONFIG)(both)
    value.backward()
    sigmoid = 1 / (1 + math.exp(-1))
    assert value.item() == pytest.approx(3 * sigmoid)
    assert both.grad is not None
    assert both.grad[0].tolist() == pytest.approx([3 * (sigmoid + sigmoid * (1 - sigmoid)), sigmoid])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_input_is_kept(dtype: torch.dtype) -> None:
    kept: list[torch.Tensor] = []
    both = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        GatedUnit(CONFIG)(both).sum().backward()
    assert [tensor.data_ptr() for tensor in kept] == [both.data_ptr()]


def test_another_activation_is_refused() -> None:
    with pytest.raises(AssertionError, match="SwiGLU"):
        GatedUnit(SimpleNamespace(**{**vars(CONFIG), "activation_func": torch.nn.functional.gelu}))
