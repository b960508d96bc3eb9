"""Sinks for the records of a run: `metrics.jsonl`, TensorBoard, and registered ones."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dist_transformer.base.files import append_to, log_lines
from dist_transformer.config.registry import Registry
from dist_transformer.run.layout import METRICS_FILE

S = TypeVar("S")


class MetricSink(Protocol):
    """A receiver of a run's records, on rank 0 only."""

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of `step`.

        Args:
            kind: `train`, `valid`, `epoch`, `checkpoint` or `end`.
        """

    def close(self) -> None:
        """Close the sink: the run has ended, or was stopped."""


SINKS: Registry[Callable[[Path, int], MetricSink]] = Registry("metric sink")
"""Sinks from outside the package. Each is made with the run folder and the step after which training continues, 0 for a
new run: records of later steps come again. A sink that raises an error is dropped with a warning."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per record, written immediately. A value that is not finite becomes null."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS_FILE
        self._file = append_to(self.path)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write((json.dumps({"kind": kind, "step": step, **finite}) + "\n").encode())
        self._file.flush()

    def has_recorded(self, kind: str, step: int) -> bool:
        """Return whether the file has such a record."""
        begin = json.dumps({"kind": kind, "step": step}).removesuffix("}")
        return any(line.startswith(f"{begin},") for line in log_lines(self.path))

    def close(self) -> None:
        self._file.close()


class OptionalSink(Generic[S]):
    """A sink that training can do without: after its first error it is dropped, with a warning.

    Args:
        make: makes the sink; None: there is none.
        lost: called once, with the error.
    """

    def __init__(self, make: Callable[[], S | None], lost: Callable[[Exception], None]) -> None:
        self._lost = lost
        self._sink: S | None = None
        self._attempt(lambda: setattr(self, "_sink", make()))

    def use(self, work: Callable[[S], object]) -> None:
        """Pass the sink to `work`, unless it was dropped."""
        if (sink := self._sink) is not None:
            self._attempt(lambda: work(sink))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._sink = None
            self._lost(error)
