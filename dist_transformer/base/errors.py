"""Errors that a user can act on, in one sentence that names file or field and remedy, and messages of the library."""

import errno
import gc
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from dist_transformer.base.streams import guard_streams, is_closed, reader_is_gone
from dist_transformer.base.urls import without_secrets

# Characters that control a terminal or hide text: control characters except line ends and tabs, line separators,
# direction marks, and halves of surrogate pairs, which stand for bytes that are not UTF-8.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Start of the text of an OSError; the words after it say the same.
_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")

logger = logging.getLogger("dist_transformer")
"""Logger of the library's messages: commands print them, and other programs configure it by `logging`."""

_PACKAGE = Path(__file__).parents[1]
# New objects between two searches for garbage: torch's million objects stay, and Python's 700 would search them often.
_RARELY = 100_000
_TRACEBACK = "--traceback"
# The ranks of a launch inherit it.
_TRACEBACK_VARIABLE = "DIST_TRANSFORMER_TRACEBACK"
# Variables of launchers: the number of this process, and how many they started.
_RANKS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}


class UserError(Exception):
    """Bad input, settings or files. The message is one sentence for the user; no traceback is shown.

    Names and values in it may come from hostile files: characters that move the cursor or end the line are escaped.
    Secrets of URLs are hidden, which errors of libraries may contain, and the numbers of the system's errors.
    """

    def __str__(self) -> str:
        return one_line(_for_a_person(super().__str__()))


def _for_a_person(text: str) -> str:
    return _ERROR_NUMBER.sub("", without_secrets(text))


class WriteError(UserError, OSError):
    """A file or folder that the system does not let us write; `OSError` has number, reason and path."""

    def __str__(self) -> str:
        remedy = "choose another place"
        if self.errno in _FULL:
            first = "raise the limit of file size (ulimit -f)" if self.errno == errno.EFBIG else "free space there"
            remedy = f"{first}, and run the same command again"
        return one_line(f"{self.filename} cannot be written ({self.strerror}): {remedy}")


def failure(error: Exception, what: str, remedy: str) -> str:
    """Describe an error of a collective action: as it says itself, or else by what failed, the reason and a remedy."""
    if isinstance(error, UserError) and not isinstance(error, WriteError):
        return str(error)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{what} ({reason}): {remedy}"


class TransientError(UserError):
    """An error that input and settings did not cause. The same command may succeed, so finished work is kept."""


def printable(text: str) -> str:
    """Escape a text for a terminal, so that names from files cannot control it."""
    return _COMMANDS.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Escape a text as `printable` does, and its line ends and tabs, too."""
    return printable(text).translate({ord("\n"): "\\n", ord("\t"): "\\t"})


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a line for a person and flush it, without the secrets of URLs and the numbers of the system's errors.

    Control characters are escaped, and characters that the encoding lacks.
    """
    stream = sys.stdout if file is None else file
    line = printable(_for_a_person(str(text)))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def log_line(line: str) -> None:
    """Log a line of a report: as a warning if it begins as one, otherwise as info."""
    logger.log(logging.WARNING if line.startswith("warning: ") else logging.INFO, line)


class Printer(logging.Handler):
    """Handler that prints a message by `say`: warnings to stderr, others to stdout or the stream that a record names.

    An error of the stream is raised, so that a command decides on it as on one of `say`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        name = "stderr" if record.levelno >= logging.WARNING else "stdout"
        say(record.getMessage(), file=getattr(sys, getattr(record, "stream", name)))


def print_messages() -> None:
    """Print the library's messages, as commands do."""
    logger.setLevel(logging.INFO)
    logger.handlers = [Printer()]
    # A library that a command imports may give the root logger a handler.
    logger.propagate = False


def caution(text: object) -> None:
    """Warn a person on standard error."""
    say(f"warning: {text}", file=sys.stderr)


def exit_on_user_error(main: Callable[[], None], *, prints: bool = True) -> None:
    """Run a command's `main`. A `UserError` becomes one line on stderr and exit status 1; Ctrl-C becomes status 130.

    Memory that is short is such an error, too: settings that the checks allow may be too large for a machine.
    So is a full disk. A result that stdout does not accept is an error, unless the reader of the pipe has read enough.
    Any other exception is a mistake of ours: one line with its place, and the traceback with `--traceback`.

    Args:
        prints: refuse a closed stdout at once, because the command prints its result.
    """
    gc.set_threshold(_RARELY)
    if _TRACEBACK in sys.argv:
        sys.argv.remove(_TRACEBACK)
        os.environ[_TRACEBACK_VARIABLE] = "1"
    try:
        guard_streams(_refuse_loss)
        print_messages()
        _require_utf8(sys.argv[1:])
        if prints and is_closed(sys.stdout):
            _refuse_loss(None)
        _run_and_flush(main)
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except BrokenPipeError as error:
        # The reader of stdout has enough, such as `| head`; or another connection broke, and the work is not finished.
        raise SystemExit(0 if reader_is_gone() else report(error)) from None
    except Exception as error:
        raise SystemExit(report(error)) from None
    finally:
        # What stdout does not accept now would be a second message at the interpreter's end.
        with suppress(UserError, OSError):
            sys.stdout.flush()
        # The interpreter's end would search all objects once more, for half a second.
        gc.freeze()


def report(error: Exception) -> int:
    """Print what an exception other than a `UserError` means to a user; gives the exit status."""
    hint = f"; run again with {_TRACEBACK} to see all"
    if _TRACEBACK_VARIABLE in os.environ:
        traceback.print_exception(error)
        hint = ""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if number := lack_of_room(error):
        place = getattr(error, "filename", None) or "a file"
        reason = getattr(error, "strerror", None) or os.strerror(number)
        text = str(WriteError(number, reason, place))
    elif _is_short_of_memory(error):
        text = (
            f"out of memory ({reason:.300}): use smaller sizes or batches, or fewer processes; "
            "dist-transformer plan predicts the memory of training"
        )
    else:
        text = f"{_rank()}{type(error).__name__} in {_place_of(error)}: {reason:.300}{hint}"
    say(f"error: {text}", file=sys.stderr)
    return 1


def _rank() -> str:
    """Name the rank of this process, if a launcher has started several."""
    ranks = (f"rank {os.environ.get(rank)}: " for rank, size in _RANKS.items() if os.environ.get(size, "1") != "1")
    return next(ranks, "")


def _place_of(error: Exception) -> str:
    """Name the last line of this package that an exception came through, or of other code if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    frame = (ours or frames)[-1]
    path = Path(frame.filename)
    return f"{path.relative_to(_PACKAGE) if ours else path.name}:{frame.lineno}"


def lack_of_room(error: Exception) -> int:
    """Return the system's number of an error of a full disk, a used quota or a limit of file size; 0: it is another.

    Libraries have classes of their own for it.
    """
    number = error.errno if isinstance(error, OSError) else None
    return next((each for each in _FULL if each == number or os.strerror(each) in str(error)), 0)


def _is_short_of_memory(error: Exception) -> bool:
    # torch's allocator for CPUs has no class of its own, and this module does not import torch.
    words = ("can't allocate memory", "Cannot allocate memory")
    named = type(error).__name__ == "OutOfMemoryError" or any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or named


def _run_and_flush(main: Callable[[], None]) -> None:
    try:
        main()
    except SystemExit as end:
        if end.code in (None, 0):
            sys.stdout.flush()
        raise
    sys.stdout.flush()


def _require_utf8(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"the argument {word:.200} is not UTF-8: write it in UTF-8, or rename the file") from None


def _refuse_loss(error: OSError | None) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    if error is None:
        raise TransientError("standard output is closed: open it, for instance with > FILE or > /dev/null")
    raise TransientError(f"standard output cannot be written ({error.strerror or error}): choose another place")
