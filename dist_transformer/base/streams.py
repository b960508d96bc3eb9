"""Standard output and error as streams whose failure the program decides on."""

import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_NAMES = {1: "stdout", 2: "stderr"}


class OwnStream(io.RawIOBase):
    """A file descriptor whose first failed write calls `on_loss`; data that it does not accept is lost.

    Every write is tried, so that a log continues when its disk has room again. A write is complete, also if the system
    takes the data in parts. If a signal handler raises within it, the rest of the data is lost.

    Args:
        on_loss: called with the first error; what it raises goes to the writer.
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
        given = left = memoryview(data).cast("B")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if not self._has_lost:
                self._has_lost = True
                self._on_loss(error)
        return len(given)


def own_stream(
    descriptor: int, on_loss: Callable[[OSError], None], *, like: TextIO | None, errors: str | None = None
) -> TextIO:
    """Make a text stream over an `OwnStream`, with the encoding and the buffering of another stream.

    Args:
        errors: how characters that the encoding lacks are written; None: as in `like`.
    """
    # No BufferedWriter is between them: it would write its data again after an exception of a signal handler.
    return io.TextIOWrapper(
        OwnStream(descriptor, on_loss),  # type: ignore[type-var]
        encoding=getattr(like, "encoding", "utf-8"),
        errors=errors or getattr(like, "errors", "backslashreplace"),
        line_buffering=errors is not None or getattr(like, "line_buffering", False),
    )


def open_missing() -> None:
    """Open closed standard descriptors on /dev/null, so that no file opened later gets their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def guard_streams(on_loss: Callable[[OSError | None], None]) -> None:
    """Replace standard output by a stream that calls `on_loss`, and standard error by one that never fails.

    Streams that are not those of the process, as a test puts them in place, stay.

    Args:
        on_loss: called with the first error in writing to standard output; None: it is closed.
    """
    open_missing()
    if sys.stdout is None:
        # No write to this descriptor succeeds.
        sys.stdout = own_stream(-1, lambda _: on_loss(None), like=None)
    elif sys.stdout is sys.__stdout__:
        sys.stdout = own_stream(1, on_loss, like=sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = own_stream(
            -1 if sys.stderr is None else 2, lambda _: None, like=sys.stderr, errors="backslashreplace"
        )


def outlive_streams(*, remedy: str) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise; a closed one is replaced by /dev/null.

    A training continues after a closed pipe (`train … | head`), with a full disk under a log file, or without a
    terminal. The first line that is lost on one of them is reported on the other.

    Args:
        remedy: end of that report: what continues, and where to look.
    """
    open_missing()
    for descriptor, name in _NAMES.items():
        before = getattr(sys, name)
        if before is not None:
            with suppress(OSError):
                before.flush()
        # The number of a closed descriptor may belong to another file by now.
        target = descriptor if before is not None else os.open(os.devnull, os.O_WRONLY)
        # A name with a character that the terminal's encoding lacks must not end a training.
        stream = own_stream(target, _reporter_of_loss(descriptor, remedy), like=before, errors="backslashreplace")
        setattr(sys, name, stream)


def _reporter_of_loss(descriptor: int, remedy: str) -> Callable[[OSError], None]:
    """Make a function that reports a loss on the other stream, without buffers; that stream may be lost, too."""

    def report(error: OSError) -> None:
        text = f"{_NAMES[descriptor]} cannot be written ({error.strerror}): {remedy}\n"
        other = sys.stderr if descriptor == 1 else sys.stdout
        with suppress(OSError, ValueError):
            os.write(other.fileno(), text.encode())

    return report


def is_closed(stream: TextIO) -> bool:
    """Return whether `guard_streams` found the stream closed."""
    raw = _raw(stream)
    return raw is not None and raw.fileno() < 0


def _raw(stream: TextIO) -> OwnStream | None:
    raw = getattr(stream, "buffer", None)
    return raw if isinstance(raw, OwnStream) else None


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe without a reader; always False if `guard_streams` did not replace it."""
    raw = _raw(sys.stdout)
    if raw is None or raw.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(raw.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
