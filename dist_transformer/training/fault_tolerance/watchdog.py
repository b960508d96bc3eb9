"""End a job that hangs, and report which rank holds it up.

Each rank has two threads besides its main thread. One measures the time since the last sign of progress, and ends the
process when a phase exceeds its limit; it uses no file, because the file system may be what hangs. The other publishes
where the rank is and checks whether another rank has failed.
"""

import faulthandler
import itertools
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dist_transformer.base.errors import failure, printable
from dist_transformer.base.files import append_to, make_folder, remove, write_file
from dist_transformer.run.layout import HANGS
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import COLLECTIVE_ADVICE, collective_record
from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance.heartbeats import Beat, Failure, Heartbeats
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.signals import HUNG, Signals

_PACKAGE = Path(__file__).parents[2]
# Longest and shortest time between beats, and beats per shortest limit: reports on a rank must be recent.
_BEAT_SECONDS, _SHORTEST_BEAT_SECONDS, _BEATS_A_LIMIT = 10.0, 0.2, 20
# A rank whose beat did not change for this many intervals gives no sign of life. A report may take this many intervals
# in all, or this many seconds on a busy machine if that is more.
_SILENT_BEATS, _REPORT_BEATS, _REPORT_SECONDS = 2.5, 6, 30.0
# A limit that follows the steps is this many times the slowest of so many recent ones, but at least so long: a stalled
# file system recovers within minutes. It begins after a few steps, and never exceeds the first.
_SLOW_STEPS, _RECENT_STEPS, _FEW_STEPS, _LEAST_SECONDS = 20, 100, 10, 300.0
_FIRST_SECONDS = 1800.0
# How long a rank may take to fail by itself after another has failed, and to exit after its own failure.
_ECHO_SECONDS, _LEAVING_SECONDS = 5.0, 120.0
# Ctrl-C ends DeepSpeed's outer launcher at once, but the inner one lets the ranks save.
_HANDLER_SECONDS, _STOPPING_SECONDS = 3.0, 120.0
# Names that torch reads, the newer one first, and our defaults.
_RECORDING = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
}
_RECORD_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def record_collectives(run_dir: Path) -> None:
    """Let torch record the last collectives of NCCL, and write them into `run_dir` if NCCL itself finds a hang.

    It has an effect before the process group is made. Variables that the user has set stay as they are.
    """
    prefix = str((run_dir / HANGS / "nccl-rank-").absolute())
    for names, value in (_RECORDING | {_RECORD_PREFIX: prefix}).items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


class Phase(StrEnum):
    """The current work of a rank."""

    JOINING = "joining"
    SET_UP = "set-up"
    STEP = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    LEAVING = "leaving"


class _Moment(NamedTuple):
    """A rank's phase and progress. It is replaced as a whole, so that threads read it without a lock."""

    phase: Phase
    step: int
    began: float
    progress: int


class Watchdog:
    """Watch one rank; does nothing before `start`.

    Args:
        limits: seconds without progress that end the job, by phase. Phases that are missing have no limit here. If that
            of a step is 0, it follows the measured steps.
    """

    def __init__(self, world: World, limits: Mapping[Phase, float]) -> None:
        self.world, self.signals = world, Signals(speaks=world.is_main)
        self._follows = limits.get(Phase.STEP) == 0
        limits = {**limits, Phase.STEP: _FIRST_SECONDS} if self._follows else limits
        self.limits = {**limits, Phase.LEAVING: _LEAVING_SECONDS}
        self._recent = deque[float](maxlen=_RECENT_STEPS)
        self.longest = dict.fromkeys(Phase, 0.0)
        """Longest seconds per phase so far, without the first step, which compiles."""
        self.endings: list[Callable[[], object]] = []
        """Calls that end processes of this rank. They are made before the watchdog ends the rank."""
        shortest = min(limits.values(), default=float("inf"))
        self._interval = max(_SHORTEST_BEAT_SECONDS, min(_BEAT_SECONDS, shortest / _BEATS_A_LIMIT))
        self._born = time.monotonic()
        self._moment = _Moment(Phase.JOINING, 0, self._born, 0)
        self._started = self._stepped = False
        self._heartbeats: Heartbeats | None = None
        self._failure: Failure | None = None
        self._closed = threading.Event()
        # Once `_closed` is set under this lock, no beat is written.
        self._writing = threading.Lock()
        self._launchers: LauncherWatch | None = None

    def start(self, launchers: LauncherWatch) -> "Watchdog":
        self._started, self._launchers = True, launchers
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    @property
    def age(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._born

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Record that the main thread enters a phase, or the next step."""
        now = time.monotonic()
        before = self._moment
        if before.phase != Phase.STEP or self._stepped:
            self.took(before.phase, now - before.began)
            if before.phase == Phase.STEP:
                self._follow_steps(now - before.began)
        self._stepped |= before.phase == Phase.STEP
        self._moment = _Moment(phase, step, now, before.progress + 1)

    def _follow_steps(self, seconds: float) -> None:
        """Fit the limit of a step to what steps take."""
        self._recent.append(seconds)
        if self._follows and len(self._recent) >= _FEW_STEPS:
            slow = _SLOW_STEPS * max(self._recent)
            self.limits[Phase.STEP] = min(max(slow, _LEAST_SECONDS), _FIRST_SECONDS)

    def took(self, phase: Phase, seconds: float) -> None:
        """Record the duration of a phase whose work was outside the main thread."""
        self.longest[phase] = max(self.longest[phase], seconds)

    def progress(self) -> None:
        """Record progress of the main thread within its phase."""
        self._moment = self._moment._replace(progress=self._moment.progress + 1)

    def publish_in(self, run_dir: Path) -> None:
        """Start to publish this rank's state in the run folder.

        Collective: every rank must call it.
        """
        if not self._started:
            return
        heartbeats = Heartbeats(run_dir, self.world, distributed.broadcast_object(uuid.uuid4().hex))

        def prepare() -> None:
            if self.world.is_main:
                heartbeats.remove_earlier()
                if _RECORD_PREFIX[0] in os.environ:
                    # NCCL writes its record there after an error, and makes no folder.
                    make_folder(run_dir / HANGS)

        distributed.on_all_ranks(
            prepare,
            errors=(OSError,),
            describe=lambda error: failure(error, f"cannot write in {run_dir}", "choose another --run-dir"),
        )
        self._heartbeats = heartbeats
        # The first beat comes from this thread, so that even a rank that fails at once has been seen.
        self._publish(heartbeats, 0)
        threading.Thread(target=self._beat, args=(heartbeats,), name="heartbeat", daemon=True).start()

    def fail(self, error: Exception) -> Failure | None:
        """Record that the main thread ends by `error`.

        Returns:
            the earlier failure of another rank, of which this error is then an echo; otherwise None.
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
            # If the folder is gone, the user must see the error itself.
            return None
        return None if first.rank == own.rank else first

    def close(self) -> None:
        """End well: afterwards this rank has no heartbeat.

        Waits for a beat in progress. The watch continues meanwhile, so a file system that hangs here ends the process
        as it does elsewhere.
        """
        self.enter(Phase.LEAVING, self._moment.step)
        with self._writing:
            if self._heartbeats is not None:
                with suppress(OSError):
                    self._heartbeats.withdraw()
            self._closed.set()

    def _watch(self) -> None:
        """Count time in which this thread could run, because a job that was suspended as a whole has not hung."""
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
        """End at once: a user who kills a launcher may restart the run now, and two must not write into one folder."""
        self._closed.wait(_HANDLER_SECONDS + self.longest[Phase.STEP])
        if self.signals.received is not None:
            self._closed.wait(_STOPPING_SECONDS)
        self._exit(f"{launcher} is gone; the last checkpoint is intact")

    def _follow(self, failure: Failure) -> None:
        """End this rank after another has failed; in most cases it fails by itself first."""
        if failure.is_hang:
            self._within_reason(lambda: self._report(failure))
        else:
            self._closed.wait(_ECHO_SECONDS)
        if self._moment.phase != Phase.LEAVING:
            self._exit(str(failure), status=HUNG if failure.is_hang else 1)

    def _end_hang(self, moment: _Moment) -> None:
        minutes = self.limits[moment.phase] / 60
        reason = f"no progress in {moment.phase}, step {moment.step}, for {minutes:g} minutes"
        self._within_reason(lambda: self._report(Failure(rank=self.world.rank, reason=reason, is_hang=True)))
        self._exit(reason, status=HUNG)

    def _within_reason(self, work: Callable[[], object]) -> None:
        """Do work that uses files or other processes, but wait for it only for a limited time."""
        helper = threading.Thread(target=work, name="report", daemon=True)
        helper.start()
        helper.join(max(_REPORT_SECONDS, _REPORT_BEATS * self._interval))

    def _report(self, failure: Failure) -> None:
        """Write the stacks of this rank to stderr and to a file, and report the rank that holds up the others."""
        head = f"rank {self.world.rank} hangs or is held up ({failure.reason}); stacks of its threads:"
        _tell(head)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if self._heartbeats is None:
            return
        file = self._heartbeats.run_dir / HANGS / f"rank-{self.world.rank}.txt"
        self._heartbeats.first_failure(failure)
        make_folder(file.parent)
        remove(file)
        with append_to(file) as stacks:
            stacks.write(f"{head}\n".encode())
            stacks.flush()
            faulthandler.dump_traceback(stacks.fileno(), all_threads=True)
        # This takes several beats, during which this rank's own beats must continue.
        verdict = self._heartbeats.who_is_behind(wait_seconds=_SILENT_BEATS * self._interval)
        if self.world.size > 1:
            verdict += f"\n{COLLECTIVE_ADVICE}"
        with append_to(file) as stacks:
            stacks.write(f"{verdict}\n".encode())
        _tell(verdict)
        # Last, because it asks NCCL, which may hang.
        if (record := collective_record()) is not None:
            file = file.with_name(f"nccl-rank-{self.world.rank}.json")
            write_file(file, record)
            _tell(f"the last collectives of rank {self.world.rank} are in {file}")

    def _exit(self, reason: str, *, status: int = 1) -> None:
        """End the process, unless this rank has ended well in the meantime."""
        if not self._closed.is_set():
            _tell(f"error: rank {self.world.rank} ends: {reason}")
            self._within_reason(lambda: [end() for end in tuple(self.endings)])
            os._exit(status)


def _tell(text: str) -> None:
    """Print in one write, so that the lines of ranks do not mix; not by the logger, whose lock the hang may hold."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def _where_main_is() -> str:
    """Return the project's innermost function in the main thread's stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _PACKAGE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    if frame is None:
        return "outside of the project's code"
    return f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
