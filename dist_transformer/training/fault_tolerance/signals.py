"""Signals that ask a job to save and end."""

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

INTERRUPTED = 75
"""Exit status, EX_TEMPFAIL of sysexits.h: interrupted and saved, start the same command again. 0 is finished."""

_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A terminal and a launcher both deliver one Ctrl-C: only what comes later than this is a second one.
_SECOND_CTRL_C_SECONDS = 2.0
_ACKNOWLEDGED = b"stopping after this step; again to end now\n"


class Signals:
    """Remembers that this process was told to end.

    Until `listen`, signals do what they always do: before the first step nothing would be lost.

    Args:
        speaks: acknowledge Ctrl-C on stderr; for one rank of a job.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.speaks = speaks
        self.received: signal.Signals | None = None
        self._since = 0.0

    def listen(self) -> None:
        """From now on only remember them. For the main thread."""
        for number in _STOPPING:
            signal.signal(number, self._remember)
        # What a shell starts in the background ignores Ctrl-C, and shall go on doing so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._remember)

    def forget(self) -> None:
        """From now on they end the process at once: it has failed, and there is nothing to save."""
        for number in _STOPPING:
            signal.signal(number, signal.SIG_DFL)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            if number == signal.SIGINT and self.speaks:
                _acknowledge()
        elif number == signal.SIGINT and time.monotonic() - self._since > _SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def _acknowledge() -> None:
    """Say so in one write past Python's buffers, which the interrupted code may be in the middle of."""
    with suppress(OSError, AttributeError):
        stderr = sys.stderr.fileno()
        # A terminal shows ^C where the cursor was, mostly behind a progress bar.
        os.write(stderr, b"\n" + _ACKNOWLEDGED if os.isatty(stderr) else _ACKNOWLEDGED)
