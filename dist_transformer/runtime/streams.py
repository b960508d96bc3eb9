"""Standard output and error that cannot end a training.

After a closed pipe (`train … | head`), with a full disk under a log file or without a terminal, lines are lost and the
run continues.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_NAMES = {1: "stdout", 2: "stderr"}


class _Lossy(io.RawIOBase):
    """A file descriptor whose writes never fail: data that it does not accept is lost.

    Every write is tried, so that a log continues when its disk has room again.

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
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise; a closed one is replaced by /dev/null.

    The first line that is lost on one of them is reported on the other.

    Args:
        remedy: end of that report: what continues, and where to look.
    """
    _open_missing()
    for descriptor, name in _NAMES.items():
        before = getattr(sys, name)
        if before is not None:
            with suppress(OSError):
                before.flush()
        # The number of a closed descriptor may belong to another file by now.
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
    """Open closed standard descriptors on /dev/null, so that no file opened later gets their numbers."""
    for descriptor in (0, *_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _reporter_of_loss(descriptor: int, remedy: str) -> Callable[[OSError], None]:
    """Make a function that reports a loss on the other stream, without buffers; that stream may be lost, too."""

    def report(error: OSError) -> None:
        text = f"{_NAMES[descriptor]} cannot be written ({error.strerror}): {remedy}\n"
        other = sys.stderr if descriptor == 1 else sys.stdout
        with suppress(OSError, ValueError):
            os.write(other.fileno(), text.encode())

    return report
