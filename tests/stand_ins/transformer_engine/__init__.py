"""A stand-in for Transformer Engine on machines without a GPU: torch behind the names and signatures that Megatron-Core
calls.

It is there for what lies around the kernels: which modules a spec builds, their names on disk, the marks on their
weights, the collectives of tensor and sequence parallelism, the optimizer's step per group. Like the real one its
attention refuses float32 here, because the real one falls back to S x S matrices.
"""

__version__ = "2.11.0"

from transformer_engine import common, pytorch  # noqa: F401
