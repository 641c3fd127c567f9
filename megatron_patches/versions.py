"""What differs between the releases of Megatron-Core that the tests run with; the only module that knows one from another."""

from __future__ import annotations


def transformer_engine_is_installed() -> bool:
    """Whether Megatron itself found a whole Transformer Engine: one without its torch part is of no use to it."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)
