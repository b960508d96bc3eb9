"""Figures of the steps between two log lines, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.model.transformer import training_flops
from dist_transformer.training.logbook import Interval, Pace, compare_ranks, read


def test_numbers_of_64_bits_come_to_the_host_by_one_copy() -> None:
    whole, halves = torch.tensor([2**63 - 1, -5]), torch.tensor([[0.5, -0.1], [1e300, math.nan]], dtype=torch.float64)
    found = read(whole, halves)
    assert found[0].equal(whole)
    assert torch.equal(found[1].view(torch.int64), halves.view(torch.int64))


def test_utilization_by_hand() -> None:
    """Operations of 4 seconds on useful tokens, of what the devices could have done."""
    interval = Interval(source_tokens=700, tokens=[300, 500], seconds=4.0)
    model = PRESETS["tiny"].model
    operations = training_flops(model, source_tokens=700, target_tokens=800)
    assert interval.utilization(model, operations / 2) == {"mfu": pytest.approx(0.5)}
    assert interval.utilization(model, operations, passes=2) == {"mfu": pytest.approx(0.5)}
    assert interval.utilization(model, None) == {}


def test_waiting_is_per_step_and_unknown_on_a_gpu() -> None:
    interval = Interval(steps=[7, 8, 9, 10], waited_seconds=2.0)
    assert interval.communication(torch.device("cpu")) == {"exposed_communication_seconds": 0.5}
    assert interval.communication(torch.device("cuda", 0)) == {}


def test_a_ranks_own_work_is_without_waits_for_others() -> None:
    assert Interval(steps=[1, 2], seconds=5.0, waited_seconds=2.0, stall_seconds=1.0).own_seconds() == 1.5
    # On a GPU the host does not wait: 1 s of waiting for data, and 250 ms to the end of each forward pass.
    begin: Any = SimpleNamespace(elapsed_time=lambda end: end)
    assert Interval(steps=[1, 2], seconds=5.0, stall_seconds=1.0, marks=[(begin, 250.0)] * 2).own_seconds() == 0.75  # type: ignore[list-item]


def test_the_slowest_rank_is_named() -> None:
    assert compare_ranks([0.5, 0.75, 0.25]) == {
        "slowest_rank": 1,
        "slowest_rank_seconds": 0.75,
        "median_rank_seconds": 0.5,
    }
    assert compare_ranks([0.5]) == {}


def test_the_time_left_does_not_jump_with_the_last_steps() -> None:
    """Expected by hand: 50 s in 5 steps that do not count, then 95 steps of 1 s, 20 of 3 s, and a validation."""
    pace = Pace(began=0.0)
    for step in range(1, 101):
        pace.step(10.0 * step if step <= 5 else 45.0 + step)
    assert pace.left(145.0, steps=900, validations=5) == 900
    for step in range(1, 21):
        pace.step(145.0 + 3 * step)
    assert pace.left(205.0, steps=880, validations=5) == pytest.approx(880 * 155 / 115)
    pace.validated(7.0)
    assert pace.left(212.0, steps=880, validations=4) == pytest.approx(880 * 155 / 115 + 4 * 7)


def test_a_start_has_a_time_left_from_its_first_step() -> None:
    pace = Pace(began=100.0)
    # Of a resumed run, whose validation came first.
    pace.validated(7.0)
    pace.step(109.0)
    assert pace.left(109.0, steps=10, validations=1) == 10 * 2 + 7
