"""Ends a job that hangs, and says which rank holds it up.

Each rank has two threads beside its work. One counts the time since the last sign of progress and ends the process
when a phase's limit is over; it touches no file, for the file system may be what hangs. The other publishes where the
rank is and looks whether another rank has failed.
"""

import faulthandler
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dist_transformer.errors import printable
from dist_transformer.files import append_to, make_folder, remove
from dist_transformer.run.layout import HANGS
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import COLLECTIVE_ADVICE
from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance.heartbeats import Beat, Failure, Heartbeats
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.signals import Signals

_PACKAGE = Path(__file__).parents[2]
# Between beats at most, at least, and in shares of the shortest limit: what is said of a rank must be news.
_BEAT_SECONDS, _SHORTEST_BEAT_SECONDS, _BEATS_A_LIMIT = 10.0, 0.2, 20
# A rank whose beat did not change in so many intervals gives no sign of life; a report may take so many in all, and on
# a busy machine at least so many seconds.
_SILENT_BEATS, _REPORT_BEATS, _REPORT_SECONDS = 2.5, 6, 30.0
# How long a rank may take to fail by itself after another has, and to leave once it has.
_ECHO_SECONDS, _LEAVING_SECONDS = 5.0, 120.0
# Ctrl-C ends DeepSpeed's outer launcher at once, while the inner one lets the ranks save.
_HANDLER_SECONDS, _STOPPING_SECONDS = 3.0, 120.0


class Phase(StrEnum):
    """What a rank is doing."""

    JOINING = "joining"
    SET_UP = "set-up"
    STEP = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    LEAVING = "leaving"


class _Moment(NamedTuple):
    """Replaced whole, so that threads read it without a lock."""

    phase: Phase
    step: int
    began: float
    progress: int


class Watchdog:
    """Watches one rank; does nothing before `start`.

    Args:
        limits: seconds without progress that end the job, by phase; a phase without one is not limited here.
    """

    def __init__(self, world: World, limits: Mapping[Phase, float]) -> None:
        self.world, self.signals = world, Signals(speaks=world.is_main)
        self.limits = {**limits, Phase.LEAVING: _LEAVING_SECONDS}
        self.longest = dict.fromkeys(Phase, 0.0)
        """Seconds that a phase took at most; the first step, which compiles, does not count."""
        shortest = min(limits.values(), default=float("inf"))
        self._interval = max(_SHORTEST_BEAT_SECONDS, min(_BEAT_SECONDS, shortest / _BEATS_A_LIMIT))
        self._born = time.monotonic()
        self._moment = _Moment(Phase.JOINING, 0, self._born, 0)
        self._started = self._stepped = False
        self._heartbeats: Heartbeats | None = None
        self._failure: Failure | None = None
        self._closed = threading.Event()
        # Held by every thread that writes to the run folder; set under it, `_closed` ends all writing.
        self._writing = threading.Lock()
        self._launchers: LauncherWatch | None = None

    def start(self, launchers: LauncherWatch) -> "Watchdog":
        self._started, self._launchers = True, launchers
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    @property
    def age(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._born

    def enter(self, phase: Phase, step: int = 0) -> None:
        """The main thread begins something else, or the next step."""
        now = time.monotonic()
        before = self._moment
        if before.phase != Phase.STEP or self._stepped:
            self.took(before.phase, now - before.began)
        self._stepped |= before.phase == Phase.STEP
        self._moment = _Moment(phase, step, now, before.progress + 1)

    def took(self, phase: Phase, seconds: float) -> None:
        """A phase's work took so long beside the main thread."""
        self.longest[phase] = max(self.longest[phase], seconds)

    def progress(self) -> None:
        """The main thread got on within its phase."""
        self._moment = self._moment._replace(progress=self._moment.progress + 1)

    def publish_in(self, run_dir: Path) -> None:
        """Tell the other ranks from now on. A collective."""
        if not self._started:
            return
        heartbeats = Heartbeats(run_dir, self.world, distributed.broadcast_object(uuid.uuid4().hex))
        distributed.on_all_ranks(
            lambda: heartbeats.start_anew() if self.world.is_main else None,
            errors=(OSError,),
            describe=lambda error: f"cannot write to the run folder ({error}): mend it, or choose another --run-dir",
        )
        self._heartbeats = heartbeats
        # The first beat comes from this thread: a rank that fails at once has been seen.
        self._publish(heartbeats, 0)
        threading.Thread(target=self._beat, args=(heartbeats,), name="heartbeat", daemon=True).start()

    def fail(self, error: Exception) -> Failure | None:
        """The main thread ends by `error`.

        Returns:
            why another rank had failed before; this error is then an echo of that one.
        """
        self.enter(Phase.LEAVING, self._moment.step)
        self.signals.forget()
        if self._heartbeats is None:
            return None
        text = str(error).strip().split("\n")[0]
        own = Failure(rank=self.world.rank, reason=f"{type(error).__name__}: {text}", is_hang=False)
        try:
            first = self._heartbeats.first_failure(own)
        except OSError:
            # Where the folder is gone, the error itself is what the user must see.
            return None
        return None if first.rank == own.rank else first

    def close(self) -> None:
        """End well: afterwards this rank writes nothing to the run folder any more.

        Waits for a write that is under way. The watch goes on meanwhile, so a file system that hangs here ends the
        process as it does elsewhere.
        """
        self.enter(Phase.LEAVING, self._moment.step)
        with self._writing:
            if self._heartbeats is not None:
                with suppress(OSError):
                    self._heartbeats.withdraw()
            self._closed.set()

    def _watch(self) -> None:
        """Counts time in which this thread could run: a job that was suspended as a whole has not hung."""
        tick = min(1.0, self._interval)
        progress, waited, last = -1, 0.0, time.monotonic()
        while not self._closed.wait(tick):
            now, moment = time.monotonic(), self._moment
            waited = waited + min(now - last, 2 * tick) if moment.progress == progress else 0.0
            progress, last = moment.progress, now
            if self._launchers is not None and (launcher := self._launchers.gone()) is not None:
                self._leave_launcher(launcher)
            if self._failure is not None and moment.phase != Phase.LEAVING:
                self._follow(self._failure)
            if waited > self.limits.get(moment.phase, float("inf")):
                self._end_hang(moment)

    def _beat(self, heartbeats: Heartbeats) -> None:
        for count in itertools.count(1):
            if self._closed.wait(self._interval):
                break
            self._publish(heartbeats, count)

    def _publish(self, heartbeats: Heartbeats, count: int) -> None:
        moment = self._moment
        beat = Beat(
            rank=self.world.rank,
            count=count,
            progress=moment.progress,
            phase=moment.phase,
            step=moment.step,
            where=_where_main_is(),
        )
        # A file system that fails now and then ends the job at its checkpoints, not here.
        with self._writing, suppress(OSError):
            if not self._closed.is_set():
                heartbeats.publish(beat)
                self._failure = self._failure or heartbeats.known_failure()

    def _leave_launcher(self, launcher: str) -> None:
        """Ends at once: who kills a launcher may start the run again now, and two must not write into one folder."""
        self._closed.wait(_HANDLER_SECONDS + self.longest[Phase.STEP])
        if self.signals.received is not None:
            self._closed.wait(_STOPPING_SECONDS)
        self._exit(f"{launcher} is gone; the last checkpoint stands")

    def _follow(self, failure: Failure) -> None:
        """Another rank has failed: this one does as well, by itself in most cases."""
        if failure.is_hang:
            self._within_reason(lambda: self._report(failure))
        else:
            self._closed.wait(_ECHO_SECONDS)
        if self._moment.phase != Phase.LEAVING:
            self._exit(str(failure))

    def _end_hang(self, moment: _Moment) -> None:
        minutes = self.limits[moment.phase] / 60
        reason = f"no progress in {moment.phase}, step {moment.step}, for {minutes:g} minutes"
        self._within_reason(lambda: self._report(Failure(rank=self.world.rank, reason=reason, is_hang=True)))
        self._exit(reason)

    def _within_reason(self, work: Callable[[], None]) -> None:
        """Do what touches files, but do not wait for it for ever."""
        helper = threading.Thread(target=work, name="report", daemon=True)
        helper.start()
        helper.join(max(_REPORT_SECONDS, _REPORT_BEATS * self._interval))

    def _report(self, failure: Failure) -> None:
        """The stacks of this rank, to stderr and to a file, and the rank that holds up the others."""
        head = f"rank {self.world.rank} hangs or is held up ({failure.reason}); what its threads do:"
        _tell(head)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if self._heartbeats is None:
            return
        file = self._heartbeats.run_dir / HANGS / f"rank-{self.world.rank}.txt"
        with self._writing:
            if self._closed.is_set():
                return
            self._heartbeats.first_failure(failure)
            make_folder(file.parent)
            remove(file)
            with append_to(file) as stacks:
                stacks.write(f"{head}\n".encode())
                stacks.flush()
                faulthandler.dump_traceback(stacks.fileno(), all_threads=True)
        # Takes several beats, and this rank's own must go on meanwhile.
        verdict = self._heartbeats.who_is_behind(wait_seconds=_SILENT_BEATS * self._interval)
        if self.world.size > 1:
            verdict += f"\n{COLLECTIVE_ADVICE}"
        with self._writing:
            if self._closed.is_set():
                return
            with append_to(file) as stacks:
                stacks.write(f"{verdict}\n".encode())
        _tell(verdict)

    def _exit(self, reason: str) -> None:
        """End the process, unless this rank has ended well meanwhile."""
        if not self._closed.is_set():
            _tell(f"error: rank {self.world.rank} ends: {reason}")
            os._exit(1)


def _tell(text: str) -> None:
    """In one write, so that the lines of ranks do not mix."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def _where_main_is() -> str:
    """The project's innermost function in the main thread's stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _PACKAGE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    if frame is None:
        return "outside of the project's code"
    return f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
