"""Learning rates of every schedule at several warm-ups (section 5.3)."""

import dataclasses
import math

import numpy as np

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.registry import SCHEDULES
from dist_transformer.pictures.picture import Picture, draw_curves
from dist_transformer.reporting.figures import new_figure, picture_style
from dist_transformer.training.engine.schedule import learning_rate

WARMUPS = (2_000, 4_000, 8_000)
_STEPS, _EVERY = 40_000, 100


def rates(schedule: str, warmup_steps: int) -> tuple[list[int], list[float]]:
    """Compute steps and learning rates of a run of the base model with this schedule."""
    base = PRESETS["base"]
    optimizer = dataclasses.replace(base.optimizer, schedule=schedule, warmup_steps=warmup_steps)
    config = base.changed(optimizer=optimizer, max_steps=_STEPS)
    steps = [1, *range(_EVERY, _STEPS + 1, _EVERY)]
    return steps, [learning_rate(step, config) for step in steps]


def schedule_picture() -> Picture:
    """Draw one panel per registered schedule, with one curve per warm-up."""
    names = SCHEDULES.names
    with picture_style():
        rows = math.ceil(len(names) / 2)
        figure = new_figure(10.0, 2.9 * rows)
        grid = figure.subplots(rows, 2, squeeze=False).ravel()
        for axes, name in zip(grid, names, strict=False):
            drawn = {warmup: rates(name, warmup) for warmup in WARMUPS}
            curves = {f"warm-up {warmup:,} steps": (x, 1e3 * np.array(y)) for warmup, (x, y) in drawn.items()}
            draw_curves(axes, curves, name, "optimizer step", "learning rate, 10⁻³")
            axes.set_ylim(bottom=0.0)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=5)
        for axes in grid[len(names) :]:
            axes.set_axis_off()
        grid[0].legend(frameon=False, fontsize=9)
    paper = PRESETS["base"]
    steps, values = rates(paper.optimizer.schedule, paper.optimizer.warmup_steps)
    peak = int(np.argmax(values))
    return Picture(
        name="schedules",
        title="Learning rate schedules",
        section="5.3",
        caption=(
            f"The schedules of this project for d_model = {paper.model.width} and {_STEPS:,} steps. The paper's is "
            f"noam with a warm-up of {paper.optimizer.warmup_steps:,} steps, whose peak is {values[peak]:.1e} at step "
            f"{steps[peak]:,}. After the warm-up, noam is the same curve for all; a longer warm-up lowers its peak. "
            f"inverse_sqrt, cosine and constant rise to peak_lr, here {paper.optimizer.peak_lr:g}."
        ),
        alt=f"Learning rate against optimizer steps at three warm-ups, one panel for each of {', '.join(names)}.",
        figure=figure,
    )
