"""FusedAdam: AdamW in one kernel on a GPU; its step counter belongs to the group, as in Transformer Engine's."""

import torch

UPDATES = []  # one entry a step, for the test that asks who did it


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **more):
        assert adam_w_mode and not more, more
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        )

    @torch.no_grad()
    def step(self, closure=None, **_):
        UPDATES.append(len(self.param_groups))
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                scale = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - first**step))


class FusedSGD:
    """Megatron imports both or takes neither."""
