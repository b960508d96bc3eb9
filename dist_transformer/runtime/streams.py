"""Standard output and error that cannot end a training.

After a closed pipe (`train … | head`), with a full disk under a log file or without a terminal, lines are lost and the
run continues.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from dist_transformer.base.streams import open_missing, own_stream

_NAMES = {1: "stdout", 2: "stderr"}


def outlive_streams(*, remedy: str) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise; a closed one is replaced by /dev/null.

    The first line that is lost on one of them is reported on the other.

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
