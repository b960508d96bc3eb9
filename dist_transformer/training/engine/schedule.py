"""Rates as pure functions of the step, and the hook through which DeepSpeed applies those of learning."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from dist_transformer.config.settings import OptimizerConfig


def noam_rate(step: int, *, width: int, warmup_steps: int, scale: float = 1.0) -> float:
    """lrate = scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5) (section 5.3); steps count from 1."""
    return scale * width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def inverse_sqrt_rate(step: int, *, peak: float, warmup_steps: int) -> float:
    """Linear up to `peak` at `warmup_steps`, then peak · sqrt(warmup / step) (Ott et al. 2018); steps count from 1."""
    return peak * min(step / warmup_steps, (warmup_steps / step) ** 0.5)


def learning_rate(step: int, config: OptimizerConfig, *, width: int) -> float:
    """The rate of update `step`, counted from 1."""
    if config.schedule == "noam":
        return noam_rate(step, width=width, warmup_steps=config.warmup_steps, scale=config.lr_scale)
    return inverse_sqrt_rate(step, peak=config.peak_lr, warmup_steps=config.warmup_steps)


def average_decay(updates: int, decay: float) -> float:
    """How much of a moving average update number `updates` leaves: min(decay, (1 + updates) / (10 + updates)).

    The weights that training begins with are then soon forgotten; as in TensorFlow's ExponentialMovingAverage.
    """
    return min(decay, (1 + updates) / (10 + updates))


class RateScheduler:
    """Writes `rate(step)` into the optimizer; DeepSpeed calls `step()` after every update that was not skipped.

    It asks the optimizer for its groups each time, because loading a checkpoint replaces them.
    """

    def __init__(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        self.optimizer, self.rate = optimizer, rate
        self.updates = 0
        self._apply()

    def step(self) -> None:
        """One more update is done: set the rate of the next."""
        self.updates += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self._apply()

    def _apply(self) -> None:
        rate = self.rate(self.updates + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def scheduler_hook(config: OptimizerConfig, *, width: int) -> Callable[[Optimizer], RateScheduler]:
    """The `lr_scheduler` argument of `deepspeed.initialize`."""
    return lambda optimizer: RateScheduler(optimizer, lambda step: learning_rate(step, config, width=width))
