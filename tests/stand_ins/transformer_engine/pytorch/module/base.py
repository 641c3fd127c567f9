"""The base class that Megatron-Core asks modules about."""

from transformer_engine.pytorch import _Module as TransformerEngineBaseModule  # noqa: F401


def get_dummy_wgrad(*_, **__):
    raise NotImplementedError("the stand-in does not fuse gradient accumulation")
