"""One case: damaged content is read by a real reader, which succeeds or refuses it with one line, soon and in little
memory.

Readers of C and Rust are tried in a child, which may crash; the others in this process, which is warm.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable

from dist_transformer.base.errors import UserError

CPU_SECONDS, WALL_SECONDS = 10, 60
MEMORY = 2**30
"""Bytes that a reader may take besides what the process has."""

READ, REFUSED = "read", "refused"


class TooSlow(BaseException):
    """No reader catches it."""


def attempt(read: Callable[[], object], *, isolated: bool) -> str:
    """Try one case; gives READ, REFUSED, or what is wrong."""
    return _in_a_child(read) if isolated else _here(read)


def outcome_of(read: Callable[[], object]) -> str:
    try:
        read()
    except UserError as error:
        return REFUSED if _is_one_line(str(error)) else f"not one line that can be printed: {str(error)!r:.300}"
    except TooSlow:
        return f"takes more than {CPU_SECONDS} s: {_place(sys.exc_info()[2])}"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200} ({_place(error.__traceback__)})"
    return READ


def _is_one_line(message: str) -> bool:
    ends_or_moves = any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in message)
    return not ends_or_moves and len(message) < 5_000


def _place(trace: object) -> str:
    frames = traceback.extract_tb(trace)  # type: ignore[arg-type]
    own = [frame for frame in frames if "dist_transformer" in frame.filename] or frames
    return f"{own[-1].filename.rpartition('dist_transformer/')[2]}:{own[-1].lineno}" if own else "nowhere"


def _here(read: Callable[[], object]) -> str:
    def stop(*_: object) -> None:
        raise TooSlow

    before = _peak()
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(WALL_SECONDS)
    try:
        outcome = outcome_of(read)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    grown = _peak() - before
    return outcome if grown <= MEMORY else f"takes {grown / 2**20:,.0f} MiB"


def _in_a_child(read: Callable[[], object]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _bound_this_process()
            os.write(writing, outcome_of(read).encode("utf-8", "backslashreplace"))
        finally:
            # No clean-up of the parent's: its files and fixtures are not this process's.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        outcome = answer.read().decode("utf-8")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return outcome or f"ended with status {os.waitstatus_to_exitcode(status)} and without a word"


def _bound_this_process() -> None:
    """Whatever exceeds a limit gets an error, or is ended by a signal, in code of any language."""
    # What the process has freed and keeps would come on top of the limit, and a file of just its size would fit.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(WALL_SECONDS)
    # A panic of Rust, an abort and pytest's handler of signals have texts of their own.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
