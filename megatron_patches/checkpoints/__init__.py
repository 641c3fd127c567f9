"""Checkpoints: files, conversion to and from Hugging Face, export."""
