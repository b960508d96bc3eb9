"""Figures of the steps between two log lines, by hand."""

import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.model.transformer import training_flops
from dist_transformer.training.logbook import Interval


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
