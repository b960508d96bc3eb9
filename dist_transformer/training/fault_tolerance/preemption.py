"""Stop all ranks after the same step: because of a signal on any of them, or because the time limit is near."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dist_transformer.base.errors import logger
from dist_transformer.runtime import distributed
from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog

# Value of a ballot for the time limit, above every signal number.
_TIME_LIMIT = 128
# Value of a ballot for work that has ended, above both.
_ENDED = 256
_RANKS, _MICRO = 2**20, 10**6
# Time between two votes, if steps are shorter. A vote is a ring of 2 (ranks - 1) messages on the hosts: 4 ms with 8
# processes on two cores, 43 ms with 64.
VOTE_SECONDS = 1.0
# Steps between two votes at most: a run whose steps suddenly take longer does not stop later than so many of them.
_MOST_STEPS = 20
# From a vote to the next chance to stop, which is a step, or `VOTE_SECONDS` later.
_AHEAD = (Phase.STEP, Phase.STEP, Phase.EVALUATION, Phase.CHECKPOINT)
# Besides the measured times, a job reserves a twentieth of its time for the save at its end, at most a minute.
_SPARE_SHARE, _SPARE_SECONDS = 0.05, 60.0


class Preemption:
    """Agree once per second, or once per step that is longer, on whether all ranks stop after this step.

    The ballots of a step are exchanged while it computes, so that no rank waits for them. The ranks also agree in them
    on the number of steps until the next vote, and on whether a save has been written.

    Args:
        timeout_minutes: time limit of the exchange.
    """

    def __init__(self, world: World, watchdog: Watchdog, *, timeout_minutes: float) -> None:
        self.world, self.watchdog = world, watchdog
        self._group = distributed.new_cpu_group(timeout_minutes)
        self._ends, self._spare = float("inf"), 0.0
        self.all_written = False
        """Whether the vote of this step found that no rank is writing."""
        # The wish, microseconds per step, and whether this rank is writing. The highest value of each counts.
        self._ballot = torch.zeros(3, dtype=torch.int64)
        self._interval = self._steps_left = 1
        self._voted = time.monotonic()
        self._exchange: dist.Work | None = None

    def stop_within(self, seconds: float) -> None:
        """Request a stop early enough to have saved within `seconds`. One rank may call it alone."""
        self._ends = time.monotonic() + seconds
        self._spare = min(_SPARE_SECONDS, _SPARE_SHARE * seconds)

    def begin(self, *, is_writing: bool = False) -> None:
        """Send this rank's ballot at the start of a step in which all ranks vote.

        Collective: every rank must call it.

        Args:
            is_writing: a save of this rank is in progress.
        """
        self._steps_left -= 1
        if self._steps_left == 0:
            now = time.monotonic()
            pace, self._voted = (now - self._voted) / self._interval, now
            self._send(self._wish(*_AHEAD), pace=pace, is_writing=is_writing)

    def outcome(self) -> str | None:
        """Return at the end of the step why all ranks stop now, or None if they continue; the same on all ranks."""
        self.all_written = False
        if self._steps_left > 0:
            return None
        wish, rank = self._received()
        microseconds, writing = self._ballot[1:].tolist()
        self.all_written = writing == 0
        # At most twice as many steps as before, because one measurement may mislead.
        fitting = int(VOTE_SECONDS * _MICRO) // max(1, microseconds)
        self._interval = self._steps_left = max(1, min(2 * self._interval, fitting, _MOST_STEPS))
        return _reason(wish, rank)

    def wait_until(self, has_ended: Callable[[], bool]) -> str | None:
        """Wait for work of rank 0 that may take long, unless a rank is asked to stop.

        Collective: every rank must call it.

        Args:
            has_ended: called on rank 0, in each round; it sets the pace.

        Returns:
            None if the work has ended, otherwise why all ranks stop now; the same on all ranks.
        """
        while True:
            self.watchdog.progress()
            self._send(_ENDED if self.world.is_main and has_ended() else self._wish(Phase.CHECKPOINT))
            wish, rank = self._received()
            if wish != 0:
                return None if wish == _ENDED else _reason(wish, rank)

    def _send(self, wish: int, *, pace: float = 0.0, is_writing: bool = False) -> None:
        values = (wish * _RANKS + self.world.rank, int(pace * _MICRO), int(is_writing))
        self._ballot.copy_(torch.tensor(values))
        self._exchange = distributed.begin_all_reduce_max(self._ballot, self._group)

    def _received(self) -> tuple[int, int]:
        """Wait for all ballots, and return the highest wish and a rank that has it."""
        if self._exchange is not None:
            self._exchange.wait()
        return divmod(int(self._ballot[0]), _RANKS)

    def _wish(self, *ahead: Phase) -> int:
        """Return the ballot of this rank; `ahead` is the work until it can stop later."""
        if self._ends - time.monotonic() < self._needed(ahead):
            return _TIME_LIMIT
        received = self.watchdog.signals.received
        return 0 if received is None else int(received)

    def _needed(self, ahead: Sequence[Phase]) -> float:
        """Return the seconds that must be left before the work `ahead`, as long as it took at most until now."""
        return sum(self.watchdog.longest[phase] for phase in ahead) + VOTE_SECONDS + self._spare


def _reason(wish: int, rank: int) -> str | None:
    """Describe for the user what a rank wishes; None if no rank wishes to stop."""
    if wish == 0:
        return None
    return "the time limit is near" if wish == _TIME_LIMIT else f"{signal.Signals(wish).name} on rank {rank}"


def seconds_left(walltime_minutes: float, *, age: float) -> float | None:
    """Return the seconds that this job may run: from `walltime_minutes`, or if that is 0 from SLURM; None: no limit.

    Args:
        age: seconds since the start of the job.
    """
    if walltime_minutes > 0:
        return max(0.0, 60 * walltime_minutes - age)
    if "SLURM_JOB_ID" not in os.environ:
        return None
    if "SLURM_JOB_END_TIME" in os.environ:
        return max(0.0, float(os.environ["SLURM_JOB_END_TIME"]) - time.time())
    command = ["squeue", "--noheader", "--jobs", os.environ["SLURM_JOB_ID"], "--format", "%L"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(f"squeue does not report the job's time limit ({error}): pass --walltime-minutes")
        return None
    return parse_slurm_duration(answer)


def parse_slurm_duration(text: str) -> float | None:
    """Parse SLURM's `[days-][hours:]minutes:seconds` as seconds; None for UNLIMITED and other words."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
