"""A stand-in for NVIDIA's apex on machines without a GPU: what Megatron-Core takes from it where Transformer Engine
is absent.
"""
