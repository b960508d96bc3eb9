"""TensorBoard's file of a run: a second view of `metrics.jsonl`, which training can do without."""

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_transformer.files import append_to
from dist_transformer.reporting.figures import as_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Board:
    """An event file. The first error of its disk ends it, with a warning, until the run is started again.

    Events are written here and not by TensorBoard's own writer: its thread raises errors later, elsewhere, and with a
    traceback.

    Args:
        first_step: of this start; TensorBoard forgets what an earlier one wrote of later steps.
        several: there are several corpora, whose epochs are shown apart.
        warn: called once, when nothing more can be written.
    """

    def __init__(self, folder: Path, *, first_step: int, several: bool = False, warn: Callable[[str], None]) -> None:
        self._warn, self._several = warn, several
        self._file: io.BufferedWriter | None = None
        self._attempt(lambda: self._open(folder, first_step))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Show the numbers of a record, each under `kind/name`."""
        from torch.utils.tensorboard.summary import scalar

        place = f"{kind}/corpus_{values['corpus'] + 1}" if self._several and "corpus" in values else kind
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._add(lambda: [scalar(f"{place}/{name}", value) for name, value in numbers.items()], step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(lambda: [text(tag, markdown)], step)

    def picture(self, tag: str, figure: "Figure", step: int) -> None:
        from PIL import Image
        from torch.utils.tensorboard.summary import image

        def draw() -> list[Any]:
            with Image.open(io.BytesIO(as_png(figure))) as drawn:
                return [image(tag, np.asarray(drawn.convert("RGB")), dataformats="HWC")]

        self._add(draw, step)

    def close(self) -> None:
        if self._file is not None:
            self._attempt(self._file.close)

    def _open(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = append_to(folder / name)
        self._write(file_version="brain.Event:2")
        self._write(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def _add(self, make: Callable[[], list[Any]], step: int) -> None:
        """Write summaries, which a reader sees at once."""

        def write() -> None:
            assert self._file is not None
            for summary in make():
                self._write(step=step, summary=summary)
            self._file.flush()

        if self._file is not None:
            self._attempt(write)

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._abandon()
            self._warn(
                f"TensorBoard's file cannot be written ({error}): training goes on without it; metrics.jsonl has "
                "the figures"
            )

    def _abandon(self) -> None:
        """Close the file without what its disk did not take."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
