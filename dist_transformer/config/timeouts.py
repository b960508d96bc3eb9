"""The timeouts of a training job: settings that validate themselves."""

from dataclasses import dataclass

from dist_transformer.config.schema import require_not_negative, require_positive

_LIMITS = ("timeout_minutes", "setup_timeout_minutes", "checkpoint_timeout_minutes", "evaluation_timeout_minutes")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutConfig:
    """Timeouts: how long parts of a job may make no progress, and the job take."""

    timeout_minutes: float = 0.0
    """End the job without progress for so long; 0: 20 times its slowest recent step, at least 5 and at most 30."""
    setup_timeout_minutes: float = 30.0
    """The same for the time up to the first step; the message names the ranks that did not join."""
    checkpoint_timeout_minutes: float = 60.0
    """The same for one checkpoint."""
    evaluation_timeout_minutes: float = 120.0
    """The same for one validation."""
    walltime_minutes: float = 0.0
    """Time limit of the job, from its start; training saves and ends before it. 0: SLURM's limit, if there is one."""

    def __post_init__(self) -> None:
        require_positive(self, *_LIMITS[1:])
        require_not_negative(self, "timeout_minutes", "walltime_minutes")

    @property
    def collective_timeout_minutes(self) -> float:
        """Timeout of one collective in minutes."""
        # Longer than every limit above, so that the watchdog ends the job first: it names the rank that is behind.
        return 1.5 * max(getattr(self, name) for name in _LIMITS)
