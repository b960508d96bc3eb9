"""First steps of a program, before it imports torch: decide how its threads wait and how it is interrupted."""

import os
import re
import signal
import sys
from pathlib import Path

# More than every machine's cores. Without a limit, OpenMP aborts where it cannot start so many.
MOST_THREADS = 1024


def share_cores() -> None:
    """Let threads of OpenMP sleep while they wait for each other, and check OMP_NUM_THREADS.

    By default they spin for milliseconds. If other work runs on the cores, they then take the time of the thread that
    they wait for: `tiny` trained at 200 instead of 2,100 tokens/s beside two busy loops on two cores. OpenMP reads its
    variables once, when torch is imported. A policy of the user stays.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not threads:
        os.environ.pop("OMP_NUM_THREADS", None)
    elif not re.fullmatch(r"[0-9]{1,4}(,[0-9]+)*", threads) or not 1 <= int(threads.split(",")[0]) <= MOST_THREADS:
        shown = ascii(threads[:40])
        sys.exit(f"error: OMP_NUM_THREADS is {shown}: set it to a number of threads, 1 to {MOST_THREADS}, or unset it")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end the process at once, until it installs a handler that saves.

    Python's own handler raises KeyboardInterrupt, which is lost where Python ignores exceptions: in a finalizer, and in
    a callback of a weak reference. A process that ignores Ctrl-C, as those in the background of a shell, continues to.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def typed_path(path: str | Path) -> str:
    """Return a path as a user types it here, not quoted: relative if it is below this folder, otherwise absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") or "/" not in relative else relative


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)
