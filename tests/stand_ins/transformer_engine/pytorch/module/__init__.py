"""Submodules by the names that Megatron-Core imports."""
