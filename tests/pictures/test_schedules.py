"""Schedules have their peak at the end of the warm-up."""

import pytest

from dist_transformer.config.registry import SCHEDULES
from dist_transformer.pictures.schedules import WARMUPS, rates, schedule_picture


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("name", ["noam", "inverse_sqrt", "cosine", "constant"])
def test_the_peak_is_at_the_end_of_the_warm_up(name: str, warmup: int) -> None:
    steps, values = rates(name, warmup)
    # noam: 512^-0.5 · warmup^-0.5; the others: peak_lr.
    peak = (512 * warmup) ** -0.5 if name == "noam" else 1e-3
    assert values[steps.index(warmup)] == pytest.approx(peak)
    assert max(values) == pytest.approx(peak)
    # Linear before it.
    assert values[steps.index(warmup // 2)] == pytest.approx(peak / 2)
    assert steps[-1] == 40_000


def test_every_schedule_has_a_panel_with_all_warm_ups() -> None:
    picture = schedule_picture()
    panels = {axes.get_title(): axes for axes in picture.figure.axes}
    assert tuple(panels) == SCHEDULES.names
    for name, axes in panels.items():
        assert [line.get_label() for line in axes.lines] == [f"warm-up {warmup:,} steps" for warmup in WARMUPS]
        assert axes.lines[1].get_ydata().tolist() == pytest.approx([1e3 * rate for rate in rates(name, 4000)[1]])
    # 512^-0.5 · 4000^-0.5 = 6.99e-4
    assert "a warm-up of 4,000 steps, whose peak is 7.0e-04 at step 4,000" in picture.caption
