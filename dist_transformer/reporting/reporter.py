"""Reports of a run: the terminal, `metrics.jsonl` and TensorBoard. Only rank 0 writes."""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dist_transformer.base.errors import logger
from dist_transformer.base.markdown import escaped
from dist_transformer.base.sole_writer import Fence, unfenced
from dist_transformer.config.plain import flat_settings
from dist_transformer.config.settings import TimeoutConfig, TrainConfig
from dist_transformer.data.loading.packing import EpochSummary
from dist_transformer.evaluation.samples import SampleSheet
from dist_transformer.reporting.board import Board
from dist_transformer.reporting.figures import attention_picture
from dist_transformer.reporting.sinks import SINKS, MetricsFile, OptionalSink
from dist_transformer.reporting.trackers import TRACKERS
from dist_transformer.run.layout import TENSORBOARD, scan_records

# Width of a terminal of unknown size.
_COLUMNS = 80
# With less room than this, there are only figures and no bar.
_ROOM_FOR_A_BAR = 50
# Least characters of the bar; it takes all the room that the figures do not need.
_SHORTEST_BAR = 8
# Excess of the slowest rank over the median from which the line names it.
_SLOW = 0.1
# Settings of places and times, which do not help to compare runs.
_UNSHOWN = {
    "run_dir",
    "cache_dir",
    "cache_gib",
    "memory_gib",
    "log_every",
    "sinks",
    "validation_command",
    "validation_command_minutes",
    *(limit.name for limit in dataclasses.fields(TimeoutConfig)),
}


class Reporter:
    """Writer of records, lines and pictures; a no-op on ranks other than 0.

    An error of `metrics.jsonl` ends training; errors of the terminal or of TensorBoard only lose their output.

    Args:
        corpora: names of all corpora.
        quiet: write only records, and nothing to the terminal.
        sinks: names of those of the package beside `metrics.jsonl`; registered ones are always used.
        fence: called before each record; raises if this process no longer owns the run folder.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_main: bool,
        max_steps: int,
        first_step: int,
        corpora: Sequence[str] = ("",),
        quiet: bool = False,
        sinks: Sequence[str] = ("tensorboard",),
        fence: Fence = unfenced,
    ) -> None:
        self.is_main, self.quiet, self.fence = is_main, quiet, fence
        self.max_steps, self.first_step, self.corpora = max_steps, first_step, corpora
        # A bar in a terminal; plain lines without carriage returns if either stream goes to a file.
        self.bar: tqdm[Any] | None = None
        self.figures: list[str] = []
        if not is_main:
            return
        if not quiet and sys.stderr.isatty() and sys.stdout.isatty():
            room = _terminal_room()
            form = _bar_format(max_steps, [], room)
            self.bar = tqdm(total=max_steps, initial=first_step, bar_format=form, ncols=room, smoothing=0)
        self.metrics = MetricsFile(run_dir)
        earlier = scan_records(self.metrics.path, only="valid")[0].get("valid", [])
        several = len(corpora) > 1
        board = partial(Board, run_dir / TENSORBOARD, first_step=first_step, several=several, earlier=earlier)
        self.board: OptionalSink[Board] = OptionalSink(
            board if "tensorboard" in sinks else (lambda: None), self._lose_board
        )
        makers = {name: SINKS[name] for name in SINKS.names}
        makers |= {name: TRACKERS[name] for name in sinks if name in TRACKERS}
        added = [
            OptionalSink(partial(make, run_dir, first_step), partial(self._lose_sink, name))
            for name, make in makers.items()
        ]
        self.optional: list[OptionalSink[Any]] = [self.board, *added]

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Pass `values` of `step` to all sinks; `kind` is `train`, `valid`, `epoch`, `checkpoint` or `end`."""
        if self.is_main:
            self.fence()
            self.metrics.record(kind, step, values)
            for each in self.optional:
                each.use(lambda sink: sink.record(kind, step, values))

    def has_recorded(self, kind: str, step: int) -> bool:
        """Return whether `metrics.jsonl` has such a record. Only for rank 0."""
        return self.metrics.has_recorded(kind, step)

    def train_line(self, step: int, values: dict[str, Any], seconds_left: float) -> None:
        """Report the figures of an interval: next to the bar as many as fit, in a log file about 100 characters."""
        if not self.is_main:
            return
        # Name, value, and its width in a log file; the most important first, because the bar drops the last ones.
        figures = [
            ("loss", f"{values['loss']:.3f}", 6),
            ("ppl", _short(values["ppl"], 7), 7),
            ("tok/s", f"{values['target_tokens_per_second']:,.0f}", 9),
        ]
        shares = {"fill": "fill", "data stall": "data_stall", "mfu": "mfu", "memory": "peak_memory_share"}
        figures += [(name, f"{values[key]:.0%}", 4) for name, key in shares.items() if key in values]
        if (excess := _excess_of_slowest(values)) >= _SLOW:
            figures.append(("slowest", f"rank {values['slowest_rank']} +{excess:.0%}", 0))
        if self.bar is not None:
            self.figures = [f"{name} {value}" for name, value, _ in figures]
            self._fit_bar()
            return
        columns = [f"{name} {value:>{width}}" for name, value, width in figures]
        place = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        self.say("  ".join((place, *columns, f"left {format_seconds(seconds_left)}")))

    def epoch(self, step: int, epoch: EpochSummary) -> str:
        """Record a finished epoch; epochs and corpora count from 0, as in other records.

        Returns:
            a short line about it, in which epochs count from 1.
        """
        totals, fills = epoch.totals, (epoch.fill, epoch.source_fill, epoch.target_fill)
        values = {
            "corpus": epoch.corpus,
            "epoch": epoch.epoch,
            **dataclasses.asdict(totals),
            **dict(zip(("fill", "source_fill", "target_fill"), fills, strict=True)),
            "unfit_pairs": epoch.unfit_pairs,
            "left_out_pairs": epoch.left_out_pairs,
        }
        self.record("epoch", step, values)
        name = f" of {self.corpora[epoch.corpus]}" if len(self.corpora) > 1 else ""
        counts = f"{totals.pairs:,} sentences, {totals.target_tokens:,} target tokens"
        return f"epoch {epoch.epoch + 1}{name} done: {counts} (packs {epoch.fill:.0%} full)"

    def samples(self, sheet: SampleSheet) -> None:
        """Write the translations of a validation, as a table, and their attention maps to TensorBoard."""
        if not self.is_main:
            return
        of_direction = "" if sheet.direction is None else f"/{sheet.direction}"
        self.board.use(lambda board: board.text(f"samples{of_direction}", samples_table(sheet), sheet.step))
        with_maps = [sample for sample in sheet.samples if sample.attention_LTS is not None]
        for number, sample in enumerate(with_maps, 1):
            tag, figure = f"valid_attention{of_direction}/sample_{number}", attention_picture(sample)
            self.board.use(partial(Board.picture, tag=tag, figure=figure, step=sheet.step))

    def settings(self, config: TrainConfig) -> None:
        """Write the settings that can affect results to TensorBoard."""
        if self.is_main:
            shown = {name: value for name, value in flat_settings(config).items() if name not in _UNSHOWN}
            self.board.use(lambda board: board.settings(shown))

    def advance(self) -> None:
        if self.bar is not None:
            self._fit_bar().update()

    def _fit_bar(self) -> "tqdm[Any]":
        """Fit the bar to the current width of the terminal."""
        assert self.bar is not None
        self.bar.ncols = _terminal_room()
        self.bar.bar_format = _bar_format(self.max_steps, self.figures, self.bar.ncols)
        return self.bar

    def say(self, text: str) -> None:
        if not self.is_main or self.quiet:
            return
        if self.bar is None:
            logger.info(text)
            return
        # tqdm draws the bar again below the text.
        with self._fit_bar().external_write_mode():
            logger.info(text)

    def close(self) -> None:
        if self.is_main:
            if self.bar is not None:
                self._fit_bar().close()
                self.bar = None
            self.metrics.close()
            for each in self.optional:
                each.use(lambda sink: sink.close())

    def _lose_board(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        self.say(
            f"TensorBoard's file cannot be written ({reason}): training continues without it; "
            "metrics.jsonl has the figures"
        )

    def _lose_sink(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.say(f"metric sink {name!r} failed ({reason:.200}): training continues without it")


def samples_table(sheet: SampleSheet) -> str:
    """Lay out samples as a Markdown table, with all special characters escaped."""
    rows = [
        "| " + " | ".join(map(escaped, (sample.source, sample.reference, sample.hypothesis))) + " |"
        for sample in sheet.samples
    ]
    on = f"on {sheet.sentences:,} sentences"
    head = "; ".join(
        f"{name} {value:.2f} {on} ({escaped(signature)})" for name, (value, signature) in sheet.scores.items()
    )
    return "\n".join((head, "", "| source | reference | hypothesis |", "|---|---|---|", *rows))


def _excess_of_slowest(values: dict[str, Any]) -> float:
    """Return by what share the own work of the slowest rank takes longer than that of the median rank."""
    median = values.get("median_rank_seconds", 0.0)
    return values["slowest_rank_seconds"] / median - 1 if median > 0 else 0.0


def _short(value: float, width: int) -> str:
    """Format with two decimals, or with an exponent if that would take more than `width` characters."""
    text = f"{value:.2f}"
    return text if len(text) <= width else f"{value:.1e}"


def _bar_format(max_steps: int, figures: list[str], room: int) -> str:
    """Return tqdm's template of a line: the figures that fit, and a bar if there is enough room.

    tqdm chooses the width of `{bar}` so that the line has exactly `room` characters. A line without a bar may be
    shorter.
    """
    has_bar = room >= _ROOM_FOR_A_BAR
    taken = len(f"{max_steps}/{max_steps} 12:34:56 left") + (len("|| ") + _SHORTEST_BAR) * has_bar
    while figures and taken + sum(1 + len(figure) for figure in figures) > room:
        figures = figures[:-1]
    return " ".join(["{n_fmt}/{total_fmt}", *["|{bar}|"] * has_bar, "{remaining} left", *figures])


def _terminal_room() -> int:
    """Return the characters for the bar, without the last column, after which some terminals start a new line."""
    with suppress(OSError, ValueError):
        return (os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS) - 1
    return _COLUMNS - 1


def format_seconds(seconds: float) -> str:
    """Format seconds as `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def perplexity(nll: float) -> float:
    """Compute exp(nll per token), without smoothing; infinite on overflow."""
    return math.inf if nll >= 700 else math.exp(nll)
