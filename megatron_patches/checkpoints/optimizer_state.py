"""Optimizer state that survives a checkpoint bit for bit where neither Transformer Engine nor apex brings a fused Adam.

Megatron then falls back to torch's Adam, which keeps a step counter per parameter, and three things go wrong: a fresh
optimizer has no state to describe, the fully reshardable format does not know the counter, and after loading all
parameters share one. The fused optimizers keep one counter per group and pass through here untouched.
"""

from __future__ import annotations

from typing import Any

import torch


def ensure_adam_state(optimizer: Any) -> None:
    """Give a fresh torch Adam its zero state: Megatron's state_dict asserts that there is one before the first step."""
    for _, adam in _torch_adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            # torch makes moments at the first step; a checkpoint is loaded before it, into tensors that must be there
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def load_optimizer_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load what ``optimizer.sharded_state_dict`` asked for."""
    found = _torch_adams(optimizer)
    parts = [state] if len(found) == 1 else [state[index] for index in range(len(found))]
    parameter_states = [part.pop("param_state", None) for part in parts]
    optimizer.load_state_dict(state)
    for (wrapper, adam), parameter_state in zip(found, parameter_states, strict=True):
        # one tensor for all would be counted up once per parameter and step
        steps = {parameter: values.pop("step").clone() for parameter, values in adam.state.items()}
        if parameter_state is not None:
            wrapper.load_parameter_state_from_fully_reshardable(parameter_state)
        for parameter, step in steps.items():
            adam.state[parameter]["step"] = step


def _torch_adams(optimizer: Any) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's wrappers that hold a torch Adam, each with it."""
    wrappers = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [(wrapper, getattr(wrapper, "optimizer", None)) for wrapper in wrappers]
    return [(wrapper, adam) for wrapper, adam in found if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))]
