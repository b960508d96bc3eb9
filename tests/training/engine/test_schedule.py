from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_transformer.config.settings import ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.training.engine import schedule
from dist_transformer.training.engine.schedule import (
    RateScheduler,
    average_decay,
    inverse_sqrt_rate,
    learning_rate,
    noam_rate,
    scheduler_hook,
)

# d_model^-0.5 · min(step^-0.5, step · 4000^-1.5), computed apart from this code with 30 decimal digits.
NOAM = {
    512: {
        1: 1.74692810742171e-7,
        3_999: 6.98596550157942e-4,
        4_000: 6.98771242968684e-4,
        4_001: 6.98683912937353e-4,
        100_000: 1.39754248593737e-4,
    },
    1024: {
        1: 1.23526471100327e-7,
        3_999: 4.93982357930209e-4,
        4_000: 4.94105884401309e-4,
        4_001: 4.94044132743954e-4,
        100_000: 9.88211768802619e-5,
    },
}


@pytest.mark.parametrize("width", NOAM)
def test_noam_is_the_papers_formula(width: int) -> None:
    rates = {step: noam_rate(step, width=width, warmup_steps=4000) for step in NOAM[width]}
    assert rates == pytest.approx(NOAM[width], rel=1e-13)


def test_inverse_sqrt_rises_to_its_peak_and_falls_with_the_root() -> None:
    expected = {1: 2.5e-7, 100: 2.5e-5, 3_999: 9.9975e-4, 4_000: 1e-3, 4_001: 9.99875023432618e-4, 16_000: 5e-4}
    rates = {step: inverse_sqrt_rate(step, peak=1e-3, warmup_steps=4000) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-13)
    assert max(inverse_sqrt_rate(step, peak=1e-3, warmup_steps=40) for step in range(1, 400)) == 1e-3


def run(max_steps: int = 100_000, **optimizer: Any) -> TrainConfig:
    return TrainConfig.of(
        data=("data",),
        run_dir=Path("run"),
        max_steps=max_steps,
        model=ModelConfig(width=512),
        optimizer=OptimizerConfig(**optimizer),
    )


def test_the_config_chooses_the_schedule() -> None:
    noam = run(schedule="noam", warmup_steps=4000, lr_scale=2.0, peak_lr=9.0)
    assert learning_rate(4_001, noam) == pytest.approx(2 * 6.98683912937353e-4, rel=1e-13)
    inverse = run(schedule="inverse_sqrt", warmup_steps=100, lr_scale=9.0, peak_lr=4e-3)
    assert learning_rate(50, inverse) == pytest.approx(2e-3, rel=1e-13)
    assert learning_rate(400, inverse) == pytest.approx(2e-3, rel=1e-13)


def test_cosine_by_hand() -> None:
    """A third of the fall is cos 60° = 1/2, two thirds are cos 120° = -1/2: 3/4 and 1/4 of the height are left."""
    config = run(max_steps=1_300, schedule="cosine", warmup_steps=100, peak_lr=5e-3, min_lr=1e-3)
    expected = {
        1: 5e-5,
        50: 2.5e-3,
        100: 5e-3,
        500: 4e-3,
        700: 3e-3,
        900: 2e-3,
        # The end, and what comes after it.
        1_300: 1e-3,
        1_301: 1e-3,
        5_000: 1e-3,
    }
    rates = {step: learning_rate(step, config) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-13)


def test_a_warm_up_may_be_longer_than_the_run() -> None:
    for steps, expected in ((50, 5e-4), (100, 1e-3)):
        config = run(max_steps=steps, schedule="cosine", warmup_steps=100, peak_lr=1e-3)
        assert learning_rate(steps, config) == pytest.approx(expected, rel=1e-13)


def test_constant_stays_at_its_peak() -> None:
    config = run(schedule="constant", warmup_steps=4, peak_lr=2e-3)
    rates = [learning_rate(step, config) for step in (1, 2, 3, 4, 5, 10**6)]
    assert rates == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3, 2e-3], rel=1e-13)


def test_the_lowest_rate_holds_for_every_schedule_after_the_warm_up() -> None:
    noam = run(schedule="noam", warmup_steps=4000, min_lr=2e-4)
    # The warm-up is not lifted: its first rate is far below.
    assert learning_rate(1, noam) == pytest.approx(NOAM[512][1], rel=1e-13)
    assert learning_rate(4_001, noam) == pytest.approx(NOAM[512][4_001], rel=1e-13)
    assert learning_rate(100_000, noam) == 2e-4
    inverse = run(schedule="inverse_sqrt", warmup_steps=100, peak_lr=4e-3, min_lr=1e-3)
    assert [learning_rate(step, inverse) for step in (100, 400, 1_600, 6_400)] == pytest.approx(
        [4e-3, 2e-3, 1e-3, 1e-3], rel=1e-13
    )


def two_groups() -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=99.0, fused=True)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    return optimizer


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_the_first_update_uses_the_first_rate_and_each_one_its_own() -> None:
    optimizer = two_groups()
    scheduler = RateScheduler(optimizer, float)
    used = []
    for _ in range(4):
        used.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step()
    assert used == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert scheduler.get_last_lr() == [5.0, 5.0]
    assert scheduler.updates == 4


def test_a_skipped_step_keeps_the_rate_and_moves_no_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of the table on the device, which has room for three steps here, skipped ones included."""
    monkeypatch.setattr(schedule, "_TABLE_STEPS", 3)
    optimizer: Any = two_groups()
    scheduler = RateScheduler(optimizer, float, share=lambda update: update / 16)
    used, shares = [], []
    for skipped in (0, 1, 1, 0, 0, 1, 0, 0):
        used += rates_of(optimizer)[:1]
        optimizer.found_inf = torch.tensor(float(skipped))
        scheduler.step()
        shares.append(16 * float(scheduler.share))
    assert used == [1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0]
    assert shares == [1.0, 0.0, 0.0, 2.0, 3.0, 0.0, 4.0, 5.0]
    assert scheduler.updates == 5


def test_groups_that_a_load_replaces_get_the_rate() -> None:
    """torch's `load_state_dict` makes new dictionaries; a scheduler that keeps the old ones is frozen."""
    optimizer = two_groups()
    scheduler = RateScheduler(optimizer, float)
    old = optimizer.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0] is not old[0]
    scheduler.step()
    assert rates_of(optimizer) == [2.0, 2.0]
    optimizer.param_groups = [{**group, "lr": -1.0} for group in optimizer.param_groups]
    scheduler.step()
    assert rates_of(optimizer) == scheduler.get_last_lr() == [3.0, 3.0]


def test_state_goes_through_a_checkpoint() -> None:
    first = RateScheduler(two_groups(), float)
    for _ in range(7):
        first.step()
    optimizer = two_groups()
    second = RateScheduler(optimizer, float)
    second.load_state_dict(first.state_dict())
    assert rates_of(optimizer) == [8.0, 8.0]
    second.step()
    assert rates_of(optimizer) == [9.0, 9.0]


def test_step_takes_no_argument() -> None:
    """DeepSpeed calls `step(batch_size)` when `step()` raises TypeError: that must not pass for an update."""
    scheduler: Any = RateScheduler(two_groups(), float)
    scheduler.step()
    with pytest.raises(TypeError):
        scheduler.step(64)
    assert scheduler.updates == 1


def test_the_hook_makes_the_scheduler_for_deepspeeds_optimizer() -> None:
    optimizer = two_groups()
    scheduler = scheduler_hook(run())(optimizer)
    assert isinstance(scheduler, RateScheduler)
    assert scheduler.optimizer is optimizer
    assert rates_of(optimizer) == pytest.approx([NOAM[512][1]] * 2, rel=1e-13)
    for _ in range(3_999):
        scheduler.step()
    assert rates_of(optimizer) == pytest.approx([NOAM[512][4_000]] * 2, rel=1e-13)


@pytest.mark.parametrize(
    ("updates", "decay", "expected"),
    # 8,991 / 9,000 = 0.999: there the warm-up ends.
    [(1, 0.999, 2 / 11), (90, 0.999, 0.91), (8_990, 0.9999, 0.999), (8_991, 0.999, 0.999), (10**6, 0.5, 0.5)],
)
def test_the_average_forgets_the_beginning(updates: int, decay: float, expected: float) -> None:
    assert average_decay(updates, decay) == pytest.approx(expected, rel=1e-15)
