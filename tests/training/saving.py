"""A checkpoint as a test needs it: written at once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dist_transformer.training.checkpoint_writer import CheckpointWriter, Retention
from dist_transformer.training.engine import ParameterState


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
