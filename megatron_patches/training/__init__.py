"""The training run: arguments, batches, steps, loop."""
