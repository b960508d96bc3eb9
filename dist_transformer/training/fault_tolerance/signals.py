"""Handle signals that ask a job to save and end."""

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

INTERRUPTED = 75
"""Exit status of a run that was interrupted and has saved (EX_TEMPFAIL of sysexits.h): run the same command again."""
HUNG = 76
"""Exit status of a rank that hangs or is held up by one that does."""

_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_IGNORABLE = (signal.SIGINT, signal.SIGHUP)
# A terminal and a launcher both deliver one Ctrl-C, so only a signal that comes later than this is a second one.
_SECOND_CTRL_C_SECONDS = 2.0
_ACKNOWLEDGED = b"stopping after this step; press Ctrl-C again to end now\n"


class Signals:
    """Remember that this process received a signal to end.

    Before `listen`, signals have their usual effect, because nothing would be lost before the first step.

    Args:
        speaks: acknowledge Ctrl-C on stderr; True on one rank of a job.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.speaks = speaks
        self.received: signal.Signals | None = None
        self._since = 0.0

    def listen(self) -> None:
        """Start to remember signals instead of ending the process. Call it in the main thread."""
        for number in (*_STOPPING, signal.SIGINT):
            # Ctrl-C is ignored in the background of a shell, and a closed terminal under nohup: both stay ignored.
            if number not in _IGNORABLE or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._remember)

    def forget(self) -> None:
        """Let signals end the process at once again: it has failed, and there is nothing to save."""
        for number in _STOPPING:
            if number not in _IGNORABLE or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            if number == signal.SIGINT and self.speaks:
                _acknowledge()
        elif number == signal.SIGINT and time.monotonic() - self._since > _SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def _acknowledge() -> None:
    """Print the acknowledgement in one write without Python's buffers, which the interrupted code may be using."""
    with suppress(OSError, AttributeError):
        stderr = sys.stderr.fileno()
        # A terminal prints ^C at the cursor, usually behind a progress bar.
        os.write(stderr, b"\n" + _ACKNOWLEDGED if os.isatty(stderr) else _ACKNOWLEDGED)
