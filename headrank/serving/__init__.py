"""The HTTP server: one port that speaks the rerank dialects people have clients for."""
