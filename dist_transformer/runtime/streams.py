"""Standard output and error that a training outlives.

A closed pipe (`train … | head`), a full disk under a log file or a terminal that is gone loses lines, not the run.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_NAMES = {1: "stdout", 2: "stderr"}


class _Lossy(io.RawIOBase):
    """A file descriptor whose writes never fail: what it does not take is lost.

    Every write is tried, so that a log goes on when its disk has room again.

    Args:
        on_loss: called with the first error.
    """

    def __init__(self, descriptor: int, on_loss: Callable[[OSError], None]) -> None:
        self._descriptor, self._on_loss = descriptor, on_loss
        self._has_lost = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if not self._has_lost:
                self._has_lost = True
                self._on_loss(error)
            return len(data)


def outlive_streams(*, remedy: str) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise; a process that was started without one of
    them gets one that leads nowhere.

    The first line that is lost on one of them is reported on the other.

    Args:
        remedy: what the report says besides: what goes on, and where to look.
    """
    _open_missing()
    for descriptor, name in _NAMES.items():
        before = getattr(sys, name)
        if before is not None:
            with suppress(OSError):
                before.flush()
        # A descriptor that was closed may be another file's by now.
        target = descriptor if before is not None else os.open(os.devnull, os.O_WRONLY)
        raw = _Lossy(target, _reporter_of_loss(descriptor, remedy))
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),  # type: ignore[type-var]
            encoding=getattr(before, "encoding", "utf-8"),
            # A name with a character that the terminal's encoding lacks must not end a training.
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)


def _open_missing() -> None:
    """Lead closed standard descriptors nowhere, so that no file that is opened later gets such a number."""
    for descriptor in (0, *_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _reporter_of_loss(descriptor: int, remedy: str) -> Callable[[OSError], None]:
    """Make what reports a loss on the other stream, past all buffers; that stream may be lost as well."""

    def report(error: OSError) -> None:
        text = f"{_NAMES[descriptor]} cannot be written ({error.strerror}): {remedy}\n"
        other = sys.stderr if descriptor == 1 else sys.stdout
        with suppress(OSError, ValueError):
            os.write(other.fileno(), text.encode())

    return report
