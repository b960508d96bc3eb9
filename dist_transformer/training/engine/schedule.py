"""Learning rates as pure functions of the step, and the hook through which DeepSpeed applies them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from dist_transformer.config.registry import SCHEDULES
from dist_transformer.config.settings import OptimizerConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Sizes of a run that a schedule may use besides the optimizer's settings."""

    width: int
    """d_model."""
    max_steps: int


# Steps for which rates are looked up on the device.
_TABLE_STEPS = 1024

Schedule = Callable[[int, OptimizerConfig, RunSize], float]
"""Rate of an update as a pure function of its number, counted from 1, so that a resumed run computes the same rates."""


def noam_rate(step: int, *, width: int, warmup_steps: int, scale: float = 1.0) -> float:
    """lrate = scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5) (section 5.3); steps count from 1."""
    return scale * width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def inverse_sqrt_rate(step: int, *, peak: float, warmup_steps: int) -> float:
    """Linear up to `peak` at `warmup_steps`, then peak · sqrt(warmup / step) (Ott et al. 2018); steps count from 1."""
    return peak * min(step / warmup_steps, (warmup_steps / step) ** 0.5)


def cosine_rate(step: int, *, peak: float, lowest: float, warmup_steps: int, max_steps: int) -> float:
    """Linear up to `peak`, then lowest + (peak - lowest) · (1 + cos(π · progress)) / 2 (Loshchilov and Hutter 2017).

    Progress runs from 0 at `warmup_steps` to 1 at `max_steps` and stays there. A run that is resumed with another
    `max_steps` therefore continues on another curve, and its rate jumps.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * progress)) / 2


@SCHEDULES.register("noam")
def _noam(step: int, settings: OptimizerConfig, run: RunSize) -> float:
    return noam_rate(step, width=run.width, warmup_steps=settings.warmup_steps, scale=settings.lr_scale)


@SCHEDULES.register("inverse_sqrt")
def _inverse_sqrt(step: int, settings: OptimizerConfig, run: RunSize) -> float:
    return inverse_sqrt_rate(step, peak=settings.peak_lr, warmup_steps=settings.warmup_steps)


@SCHEDULES.register("cosine")
def _cosine(step: int, settings: OptimizerConfig, run: RunSize) -> float:
    return cosine_rate(
        step,
        peak=settings.peak_lr,
        lowest=settings.min_lr,
        warmup_steps=settings.warmup_steps,
        max_steps=run.max_steps,
    )


@SCHEDULES.register("constant")
def _constant(step: int, settings: OptimizerConfig, run: RunSize) -> float:
    return settings.peak_lr * min(1.0, step / settings.warmup_steps)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of update `step`, counted from 1, by the schedule. After the warm-up it is at least `min_lr`."""
    settings = config.optimizer
    schedule: Schedule = SCHEDULES[settings.schedule]
    rate = schedule(step, settings, RunSize(width=config.model.width, max_steps=config.max_steps))
    return rate if step <= settings.warmup_steps else max(rate, settings.min_lr)


def average_decay(updates: int, decay: float) -> float:
    """Return the share of a moving average that update `updates` keeps: min(decay, (1 + updates) / (10 + updates)).

    This forgets the initial weights soon. TensorFlow's ExponentialMovingAverage uses the same formula.
    """
    return min(decay, (1 + updates) / (10 + updates))


class RateScheduler:
    """Write `rate(update)` into the optimizer. DeepSpeed calls `step()` after every step, also a skipped one.

    Updates are counted on the device, from the optimizer's `found_inf`, and rates are looked up there in a table, so
    that the host does not wait to learn whether a step was skipped. The host waits only to make the next table.

    It writes into the optimizer's groups each time, because loading a checkpoint replaces them.

    Args:
        share: share of an update's weights in their moving average, as a function of the update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rate: Callable[[int], float],
        *,
        share: Callable[[int], float] = lambda update: 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.optimizer, self.rate, self._share_of = optimizer, rate, share
        self._done = torch.zeros(1, dtype=torch.int64, device=device)
        # Adam's kernel for CPUs computes with rates in fp64, that for GPUs takes fp32.
        dtype = torch.float64 if self._done.is_cpu else torch.float32
        self._next = torch.zeros(1, 2, dtype=dtype, device=device)
        """Rate and share of the next update."""
        self.share = torch.zeros((), device=device)
        """Share of the last step's weights in their moving average; 0 if the step was skipped."""
        self._make_table(0)
        self._look_up()
        # A number, because DeepSpeed writes it into a message when it begins.
        self._apply(rate(1))

    @property
    def updates(self) -> int:
        """Number of updates that were not skipped. The host waits for the device."""
        return int(self._done)

    def step(self) -> None:
        """Set the rate of the next update, after another step is done."""
        applied = self.optimizer.found_inf == 0  # type: ignore[attr-defined]
        self.share.copy_(self._next[0, 1] * applied)
        self._done += applied
        self._left -= 1
        if self._left == 0:
            self._make_table(self.updates)
        self._apply(self._look_up())

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done.fill_(state["updates"])
        self._make_table(state["updates"])
        self._apply(self._look_up())

    def _make_table(self, updates: int) -> None:
        self._first, self._left = updates, _TABLE_STEPS
        numbers = range(updates + 1, updates + 1 + _TABLE_STEPS)
        rows = [(self.rate(number), self._share_of(number)) for number in numbers]
        self._table = torch.tensor(rows, dtype=self._next.dtype).to(self._next.device)

    def _look_up(self) -> torch.Tensor:
        """Set the rate and the share of the next update, and return the rate."""
        torch.index_select(self._table, 0, self._done - self._first, out=self._next)
        return self._next[0, 0]

    def _apply(self, rate: float | torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def scheduler_hook(config: TrainConfig, device: torch.device | str = "cpu") -> Callable[[Optimizer], RateScheduler]:
    """Return the `lr_scheduler` argument of `deepspeed.initialize`."""
    return lambda optimizer: RateScheduler(
        optimizer,
        # A schedule may have no rate for updates that the run does not have.
        lambda update: learning_rate(min(update, config.max_steps), config),
        share=lambda update: 1 - average_decay(update, config.ema_decay),
        device=device,
    )
