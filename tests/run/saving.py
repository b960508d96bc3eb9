"""Checkpoints as tests need them: written at once, of parameters made by hand."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention

PART = "part-00000.safetensors"
SHAPES = {"embedding": (7, 4), "encoder.norm.bias": (4,), "scale": ()}


def save_checkpoint(
    run_dir: Path,
    states: Iterable[ParameterState],
    state: dict[str, Any],
    *,
    retention: Retention,
    weights_metadata: dict[str, str],
) -> Path:
    """Write one checkpoint and its weight file, and wait for it."""
    writer = CheckpointWriter(run_dir)
    writer.start(states, state, retention=retention, weights_metadata=weights_metadata)
    saved = writer.wait()
    assert saved is not None
    return saved.path


def states(step: int) -> Iterator[ParameterState]:
    generator = torch.Generator().manual_seed(step)
    for name, shape in SHAPES.items():
        weight, *moments = (torch.randn(shape, generator=generator) for _ in range(3))
        yield ParameterState(name=name, weight=weight, moments=dict(zip(MOMENTS, moments, strict=True)))


def save(
    run: Path,
    step: int,
    *,
    checkpoints: int = 9,
    weights: int = 9,
    best: tuple[int, ...] = (),
    averaged: bool = False,
    **state: Any,
) -> Path:
    """Save a step; its averaged weights, if there are some, are half of the weights, plus the step."""
    saved = [
        dataclasses.replace(each, moments={**each.moments, EMA: each.weight / 2 + step}) if averaged else each
        for each in states(step)
    ]
    return save_checkpoint(
        run,
        saved,
        {"step": step, "updates": step, **state},
        retention=Retention(checkpoints=checkpoints, weights=weights, best_steps=frozenset(best)),
        weights_metadata={"step": str(step)},
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pointer(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text()
