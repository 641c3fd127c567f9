"""int8 weights on the CPU: one scale per output channel, activations quantised per token, products in oneDNN's integer
kernels.

Each token has its own scale and integer sums are exact, so a token's numbers do not depend on what else is in the
batch. Projections that read the same input (q, k, v; gate and up) are joined: the input is quantised once and
multiplied once. The activations between the products stay in float32.

Shapes: T tokens, I input features, O output channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrank.reranking.decoder import Decoder, Projection
from headrank.reranking.joined import join

LARGEST = 127.0
SHIFT = 128  # between signed and unsigned integers of 8 bits
SMALLEST_SCALE = 1e-12  # a token of zeros stays zero


class Int8Projections(nn.Module):
    """Several projections of one input as one integer product; gives one output per projection."""

    def __init__(self, projections: Sequence[Projection]) -> None:
        super().__init__()
        self.sizes = [len(projection.weight) for projection in projections]
        weight_OI = torch.cat([projection.weight for projection in projections]).float()
        self.scale_O = weight_OI.abs().amax(dim=1).div_(LARGEST).clamp_min_(SMALLEST_SCALE)
        integers_OI = (weight_OI / self.scale_O[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(integers_OI, None)
        self.zeros_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        biases = [projection.bias for projection in projections]
        self.bias_O = None if biases[0] is None else torch.cat([bias.float() for bias in biases if bias is not None])

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One output [..., O] per projection, in float32."""
        integers_TI, scale_T1 = quantise_tokens(values.reshape(-1, values.shape[-1]))
        # x + 128 as unsigned with a zero point of 128: oneDNN has no fast kernel for signed activations on processors
        # with VNNI only
        # (measured: a reference loop, three thousand times slower)
        shifted_TI = integers_TI.view(torch.uint8).bitwise_xor_(SHIFT)
        # the kernel's own activation scale is one number for all tokens: a token would depend on its neighbours
        product_TO = torch.ops.onednn.qlinear_pointwise(
            shifted_TI, 1.0, SHIFT, self.packed, self.scale_O, self.zeros_O, None, 1.0, 0, values.dtype, "none", [], ""
        ).mul_(scale_T1)
        if self.bias_O is not None:
            product_TO += self.bias_O
        return product_TO.view(*values.shape[:-1], -1).split(self.sizes, dim=-1)


def quantise_tokens(values_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and the scale [T, 1] of each token: values ~ integers * scale, the largest of a token at 127."""
    # vector_norm(inf) gives the same and takes ten times as long
    largest_T1 = values_TI.abs().amax(dim=-1, keepdim=True)
    scale_T1 = largest_T1.div_(LARGEST).clamp_min_(SMALLEST_SCALE)
    return (values_TI * scale_T1.reciprocal()).round_().to(torch.int8), scale_T1


def quantise(decoder: Decoder) -> Decoder:
    """Integers in place of every projection of a float32 decoder on the CPU."""
    join(decoder, Int8Projections)
    decoder.is_int8 = True
    return decoder
