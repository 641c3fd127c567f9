"""The method: pure functions and frozen settings, shared by training and inference."""
