"""The token viewer: one query's ranked passages with their words shaded by calibrated attention, as HTML or LaTeX."""
