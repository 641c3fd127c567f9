"""The modules that Megatron-Core builds in bf16 training, with Transformer Engine's argument names and parameter
names.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401

ops = SimpleNamespace(
    SwiGLU=None, GEGLU=None, ReGLU=None, GELU=None, ReLU=None, Sequential=torch.nn.Sequential, FusibleOperation=object
)


class _Module(torch.nn.Module):
    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


class RMSNorm(_Module):
    def __init__(
        self,
        hidden_size,
        eps=1e-5,
        sequence_parallel=False,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cuda",
        **_,
    ):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


LayerNorm = RMSNorm


class _FusedProduct(torch.autograd.Function):
    """The weight's gradient goes straight into the float32 buffer; autograd gets a tensor that nobody looks at."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        if weight.requires_grad:
            weight.main_grad.add_(rows.t() @ x.flatten(0, -2))
            weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, float("nan")), rows.sum(0) if ctx.has_bias else None


class Linear(_Module):
    save_original_input = False  # the real one keeps quantised inputs in FP8

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        rng_tracker_name=None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.return_bias = (
            in_features,
            out_features,
            bias,
            return_bias,
        )
        self.sequence_parallel, self.tp_group, self.parallel_mode = sequence_parallel, tp_group, parallel_mode
        axis = {"column": 0, "row": 1}.get(parallel_mode)
        shape = [out_features, in_features]
        if axis is not None:
            shape[axis] //= tp_size
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        if init_method is not None:
            init_method(self.weight)
        # Megatron imports this module first
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        set_tensor_model_parallel_attributes(self.weight, axis is not None, axis or 0, 1)
        self.is_fused = fuse_wgrad_accumulation
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=params_dtype, device=device))

    def multiply(self, x):
        """Whole input in, this rank's part of the output out, or the parts' sum."""
        from megatron.core import tensor_parallel

        is_split = self.sequence_parallel and self.parallel_mode is not None
        if self.parallel_mode == "column":
            whole = (
                tensor_parallel.gather_from_sequence_parallel_region
                if is_split
                else tensor_parallel.copy_to_tensor_model_parallel_region
            )
            x = whole(x, group=self.tp_group)
        if FP8GlobalStateManager.is_fp8_enabled():
            x = x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach())
        product = _FusedProduct.apply if self.is_fused and hasattr(self.weight, "main_grad") else F.linear
        y = product(x, self.weight, None if self.return_bias else self.bias)
        if self.parallel_mode == "row":
            total = (
                tensor_parallel.reduce_scatter_to_sequence_parallel_region
                if is_split
                else tensor_parallel.reduce_from_tensor_model_parallel_region
            )
            y = total(y, group=self.tp_group)
        return (y, self.bias) if self.return_bias else y

    def forward(self, x, is_first_microbatch=None):
        return self.multiply(x)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        return_layernorm_output=False,
        zero_centered_gamma=False,
        normalization="LayerNorm",
        device="cuda",
        **more,
    ):
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        super().__init__(in_features, out_features, device=device, **more)
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=self.weight.dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        return self.multiply(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


class GroupedLinear(_Module):
    def __init__(self, *_, **__):
        raise NotImplementedError("the stand-in has no grouped linear layers")


class DotProductAttention(_Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, softmax_scale=None, attn_mask_type="causal", **_
    ):
        super().__init__()
        assert attn_mask_type == "causal"
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, attn_mask_type="causal", **_):
        if query.dtype == torch.float32:
            raise TypeError("float32 would take Transformer Engine's unfused attention: S x S matrices")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return context.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
