"""Settings of the checks of a job. They are apart, because the checks import torch."""

from dataclasses import dataclass
from pathlib import Path

from dist_transformer.config.schema import require_not_negative, require_positive, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightSettings:
    """Folders and limits of the checks."""

    run_dir: Path | None = None
    """Run folder of the training; default: not checked."""
    data: tuple[str, ...] = ()
    """Data folders or their URLs; default: not checked."""
    cache_dir: Path | None = None
    """Cache of shards behind URLs; default: ~/.cache."""
    run_gib: float = 20.0
    """Free GiB that the run folder must have."""
    timeout_seconds: float = setting(120.0, flag="timeout")
    """Seconds until all processes have joined, and for each check."""

    def __post_init__(self) -> None:
        require_positive(self, "timeout_seconds")
        require_not_negative(self, "run_gib")
