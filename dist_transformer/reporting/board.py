"""TensorBoard's event file of a run: an optional second view of `metrics.jsonl`.

TensorBoard orders charts by the first part of their names. Those of `main` are on its first page, and the others of
`train` and `valid` follow. Charts with one point per epoch, checkpoint or start are under `z_more`, because a chart
with a single dot says little.
"""

import io
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_transformer.base.files import append_to, make_folder
from dist_transformer.config.measures import MEASURES, badness
from dist_transformer.reporting.figures import as_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RARE = "z_more"
"""Group of charts with few points."""

# The charts that its reader looks for first: BLEU of validation, learning rate and loss of training.
_MAIN = {("valid", "bleu"), ("train", "learning_rate"), ("train", "loss")}
# Group of each kind of record. `end` has none: it repeats the values of the last `train` record.
_GROUPS = {"train": "train", "valid": "valid", "epoch": f"{_RARE}/epoch", "checkpoint": f"{_RARE}/checkpoint"}
# Charts with several curves, by title. They are the same for all runs, because TensorBoard merges equal layouts.
_CHARTS = {
    "loss: training and validation": ("main/loss", "valid/loss"),
    "nll per token, unsmoothed: training and validation": ("train/nll", "valid/nll"),
    "BLEU: validation, and the best so far": ("main/bleu", "valid/best_bleu"),
    "chrF: validation, and the best so far": ("valid/chrf", "valid/best_chrf"),
    "TER: validation, and the best so far": ("valid/ter", "valid/best_ter"),
    "score of the validation command, and the best so far": ("valid/command", "valid/best_command"),
    "learning rate": ("main/learning_rate",),
    "gradient norm": ("train/gradient_norm",),
    "target tokens/s": ("train/target_tokens_per_second",),
}
# The table of settings shows the newest point of these curves for each run.
_RESULTS = (
    "valid/best_nll",
    "valid/best_bleu",
    "valid/nll",
    "main/bleu",
    "train/nll",
    "train/target_tokens_per_second",
    *(f"valid/{best}{name}" for name in ("chrf", "ter", "command") for best in ("best_", "")),
)


class Board:
    """An event file, which is closed after an error of the disk.

    Args:
        first_step: first step of this start; TensorBoard drops later steps of an earlier start.
        several: there are several corpora, whose epochs are shown separately.
        earlier: validation records before this start, for the best score so far.

    Raises:
        OSError: the file cannot be written; likewise all methods.
    """

    # TensorBoard's own writer is not used, because its thread raises errors later, elsewhere, and with a traceback.

    def __init__(
        self, folder: Path, *, first_step: int, several: bool = False, earlier: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard.summary import custom_scalars

        self._several, self._first_step = several, first_step
        self._best: dict[str, float] = {}
        for values in earlier:
            self._update_best(values)
        make_folder(folder)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = append_to(folder / name)
        self._write({"file_version": "brain.Event:2"})
        self._write({"step": first_step + 1, "session_log": SessionLog(status=SessionLog.START)})
        # The charts of the custom scalars tab; regular expressions choose the curves.
        charts = {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in _CHARTS.items()}
        self._add(first_step, custom_scalars({"overview": charts}))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a record under `main` or their kind. For `end`, write only that the run has ended."""
        from torch.utils.tensorboard.summary import scalar

        if kind == "end":
            self._add(step, _settings_summaries({})[2])
            return
        place = _GROUPS.get(kind, f"{_RARE}/{kind}")
        if self._several and "corpus" in values:
            place = f"{place}/corpus_{values['corpus'] + 1}"
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if kind == "valid":
            self._update_best(values)
            numbers |= {f"best_{name}": best for name, best in self._best.items()}
        tags = {name: f"main/{name}" if (kind, name) in _MAIN else f"{place}/{name}" for name in numbers}
        self._add(step, *(scalar(tags[name], value) for name, value in numbers.items()))

    def settings(self, values: Mapping[str, int | float | str]) -> None:
        """Write the settings of the run to the table of results; TensorBoard keeps those of the first start."""
        self._add(self._first_step, *_settings_summaries(dict(values))[:2])

    def text(self, tag: str, markdown: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(step, text(tag, markdown))

    def picture(self, tag: str, figure: "Figure", step: int) -> None:
        from PIL import Image
        from torch.utils.tensorboard.summary import image

        with Image.open(io.BytesIO(as_png(figure))) as drawn:
            self._add(step, image(tag, np.asarray(drawn.convert("RGB")), dataformats="HWC"))

    def close(self) -> None:
        self._file.close()

    def _update_best(self, values: Mapping[str, Any]) -> None:
        for name in MEASURES:
            value = values.get(name)
            if value is not None and math.isfinite(value):
                self._best[name] = min(self._best.get(name, value), value, key=partial(badness, name))

    def _add(self, step: int, *summaries: Any) -> None:
        self._write(*({"step": step, "summary": summary} for summary in summaries))

    def _write(self, *events: dict[str, Any]) -> None:
        """Write events and flush them."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            for event in events:
                RecordWriter(self._file).write(Event(wall_time=time.time(), **event).SerializeToString())
            self._file.flush()
        except OSError:
            # What the disk did not accept is lost.
            with suppress(OSError):
                self._file.close()
            raise


def _settings_summaries(values: dict[str, int | float | str]) -> tuple[Any, Any, Any]:
    """Return TensorBoard's summaries of the experiment, of the start of this run, and of its end."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(values, dict.fromkeys(_RESULTS))
