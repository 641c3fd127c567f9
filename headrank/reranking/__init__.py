"""Reranking with a Hugging Face decoder: one truncated prefill, read and scored."""
