"""Profile some steps of a training with torch's profiler."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile

from dist_transformer.base.files import whole_path


class StepProfile:
    """A profile of the steps of `--profile` on one rank, written as a trace in Chrome's format.

    Args:
        steps: the first step and the number of steps; None: no step.
        say: called once, with the place of the trace.
    """

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, *, say: Callable[[str], None]) -> None:
        self._first, count = steps or (0, 0)
        self._last = self._first + count - 1
        self._file = run_dir / f"trace-{self._first:08d}-{self._last:08d}.json"
        self._say = say
        self._profiler: profile | None = None

    def begin(self, step: int) -> None:
        """Start to record if `step` is the first of the profile; a run that resumes later records nothing."""
        if step == self._first:
            self._profiler = profile()
            self._profiler.start()

    def end(self, step: int) -> None:
        """Write the trace if `step` is the last of the profile."""
        if self._profiler is None or step != self._last:
            return
        self._profiler.stop()
        with whole_path(self._file, durable=False) as file:
            self._profiler.export_chrome_trace(str(file))
        self._profiler = None
        self._say(f"step {step}: {self._file} is a trace of rank 0 from step {self._first}: open it in ui.perfetto.dev")
