"""Baselines that write text: RankGPT on a local model or an endpoint."""
