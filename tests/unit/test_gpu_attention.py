"""What training does otherwise on a GPU, on the CPU: the same numbers, no waiting, and few copies. Compiled kernels
are not run here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrank.method import attention, flexible_attention
from headrank.method.attention import batch_contexts, branched_context
from headrank.method.flexible_attention import CALIBRATION_BRANCH, PADDING, QUERY_BRANCH, visible_tiles
from headrank.method.loss_settings import LossSettings
from headrank.method.losses import headrank_loss
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from headrank.method.transfer import together_on
from tests.tiny_models import tiny_tokenizer
from tests.unit.test_reader_exactness import DOCUMENTS, QUERY

SAME = 1e-5  # float32, another order of summation
# until the GPU is done
WAITS = {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select"}


class Counting(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func._overloadpacket)
        if name == "aten.index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            name = "aten.nonzero"
        self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def contexts(layout: str):
    encoder = PromptEncoder(tiny_tokenizer(), PromptTemplate(document_layout=layout))
    return [encoder.encode(QUERY, DOCUMENTS), encoder.encode("flea", [*DOCUMENTS[1:], DOCUMENTS[0], DOCUMENTS[2]])]


def projections(ids_BS: torch.Tensor, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(0)
    shapes = [(ids_BS.shape[0], number, ids_BS.shape[1], 16) for number in (heads, groups, groups)]
    return [torch.randn(shape, generator=rng).to(dtype).requires_grad_() for shape in shapes]


def output_and_gradients(tensors, layout, window=None):
    context = branched_context(*tensors, layout, 0.3, window)
    seen = layout.document_of_token_BS < layout.num_documents  # not the padding, whose rows nobody reads
    context.double()[seen[:, None].expand(context.shape[:3])].square().sum().backward()
    gradients = [tensor.grad.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return [torch.where(seen[:, None, :, None], context, 0.0).detach(), *gradients]


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, SAME), (torch.bfloat16, 0.03)])
def test_products_of_a_few_rows_equal_masked_attention(monkeypatch, layout, dtype, tolerance) -> None:
    ids_BS, batch = batch_contexts(contexts(layout))
    tensors = projections(ids_BS, dtype=dtype)
    expected = output_and_gradients(tensors, batch)
    monkeypatch.setattr(attention, "_lacks_grouped_kernel", lambda query, **_: True)
    for found, wanted in zip(output_and_gradients(tensors, batch), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 24])
def test_flexible_attention_gives_the_context_and_gradients_of_the_gathered_blocks(monkeypatch, window) -> None:
    # it refuses gradients on a CPU; eager can
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    ids_BS, gathered = batch_contexts(contexts("parallel"), pad_to=300)
    _, flexible = batch_contexts(contexts("parallel"), pad_to=300, is_flexible=True)
    assert gathered.blocks.flexible is None and flexible.blocks.flexible is not None
    tensors = projections(ids_BS)
    expected = output_and_gradients(tensors, gathered, window)
    for found, wanted in zip(output_and_gradients(tensors, flexible, window), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=SAME, atol=SAME)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    opening=st.integers(1, 20),
    branches=st.integers(1, 20),
)
def test_no_tile_that_somebody_sees_is_left_out(lengths: list[int], opening: int, branches: int) -> None:
    parts = [0] * opening, *([number] * length for number, length in enumerate(lengths, start=1))
    tail = [[QUERY_BRANCH] * branches, [CALIBRATION_BRANCH] * branches, [PADDING] * 3]
    segment = np.concatenate([*map(np.asarray, parts), *map(np.asarray, tail)]).astype(np.int32)[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flexible_attention, "TILE", 8)
        number, tiles = visible_tiles(segment)
    sees = flexible_attention._visibility(torch.from_numpy(segment), torch.zeros(1), None)
    q, k = (torch.arange(segment.shape[1])[:, None], torch.arange(segment.shape[1])[None, :])
    matrix = sees(torch.tensor(0), torch.tensor(0), q, k).numpy()
    needed = {(int(row) // 8, int(column) // 8) for row, column in np.argwhere(matrix)}
    listed = {(row, int(tile)) for row in range(number.shape[1]) for tile in tiles[0, row, : number[0, row]]}
    assert needed <= listed and all(column <= row for row, column in listed)


@pytest.mark.parametrize("scaling", ["constant", "standardise", "max-min"])
def test_the_loss_and_its_gradient_never_wait_for_the_gpu(scaling: str) -> None:
    scores_N = torch.randn(20, requires_grad=True)
    pairs = torch.tensor([[0, 1], [3, 2], [5, 9]])
    with Counting() as counting:
        terms = headrank_loss(
            scores_N, torch.randn(20), torch.arange(20).flip(0) + 1, pairs, LossSettings(scaling=scaling)
        )
        terms.total.backward()
    assert {name: count for name, count in counting.calls.items() if name in WAITS} == {}
    assert sum(counting.calls.values()) < 160, "kernels of the loss of one context"


def test_a_batch_goes_to_a_device_in_one_copy_a_type() -> None:
    arrays = [
        np.arange(6).reshape(2, 3),
        np.ones(4, np.float32),
        np.zeros((2, 0), np.int64),
        np.arange(3, dtype=np.float32),
    ]
    with Counting() as counting:
        moved = together_on("meta", arrays)
    assert [(tensor.device.type, tuple(tensor.shape)) for tensor in moved] == [
        ("meta", array.shape) for array in arrays
    ]
    assert counting.calls["aten._to_copy"] == 2
    for tensor, array in zip(together_on("cpu", arrays), arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_masks_are_made_once_a_batch() -> None:
    _, layout = batch_contexts(contexts("sequential"))
    first = layout.visible_to_rows(is_calibration=True)
    with Counting() as counting:
        assert layout.visible_to_rows(is_calibration=True) is first
    assert not counting.calls
    assert dataclasses.replace(layout).visible_to_rows(is_calibration=True) is not first, (
        "another layout has masks of its own"
    )
