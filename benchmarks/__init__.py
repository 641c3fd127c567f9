"""make bench: contenders interleaved in one run, reported as ratios."""
