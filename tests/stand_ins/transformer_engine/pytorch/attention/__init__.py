"""Attention's parts by the names that Megatron-Core imports."""
