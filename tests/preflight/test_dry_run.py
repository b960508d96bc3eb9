from pathlib import Path

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import OptimizerConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.preflight.dry_run import _small_run


def test_a_lowest_rate_does_not_hold_up_the_small_run(toy_data: DataFolder, tmp_path: Path) -> None:
    """Its peak is lower than the run's, and may be lower than the run's lowest rate."""
    optimizer = OptimizerConfig(schedule="cosine", peak_lr=1e-3, min_lr=1e-3, warmup_steps=50)
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),), optimizer=optimizer)
    small = _small_run(config, tmp_path).optimizer
    assert (small.schedule, small.min_lr) == ("inverse_sqrt", 0.0)
    assert small.peak_lr < 1e-3
