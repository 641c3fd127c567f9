"""What HeadRank adds to Megatron-Core, by substitution and never by surgery."""
