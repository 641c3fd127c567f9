"""What `headrank doctor` finds out: the installation, the environment, the machine, and whether model, heads and store
fit together.

Each part is one module and one function that returns findings; only machine.py and trial.py import torch.
"""
