"""The rehearsal of a GPU job on a CPU: memory, FLOPs, traffic, time."""
