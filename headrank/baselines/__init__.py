"""The paper's baselines: attention methods as head policies, RankGPT as the generative one."""
