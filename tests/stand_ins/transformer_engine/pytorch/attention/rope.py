"""The rotary kernel: one row of float32 angles for the whole batch."""

import torch


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=False, fused=False):
    assert fused and tensor_format == "sbhd" and not interleaved
    assert freqs.dtype == torch.float32 and freqs.shape[0] >= t.shape[0] and freqs.shape[1:3] == (1, 1), freqs.shape
    angles = freqs[: t.shape[0]]
    first, second = t.float().chunk(2, dim=-1)
    return (t.float() * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()).to(t.dtype)
