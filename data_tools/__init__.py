"""From collections to training sets and benchmarks; knows nothing of Megatron."""
