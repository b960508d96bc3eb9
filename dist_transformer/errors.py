"""Errors that a user can act on: one sentence that names the file or field and the remedy."""

import re
import select
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

# Characters by which a text commands a terminal, or hides what it says: controls but line ends and tabs, separators of
# lines, what turns the direction of writing, and halves of surrogate pairs, which stand for bytes that are no UTF-8.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# More than any sentence of ours has; what is longer holds a value from a file.
_LONGEST_MESSAGE = 4_000
# Control characters, halves of surrogate pairs, and what else ends a line.
_UNSHOWN = ("Cc", "Cs", "Zl", "Zp")


class UserError(Exception):
    """Bad input, settings or files. The message is one sentence for the user; no traceback is shown.

    Names and values in it may come from hostile files: what would move a terminal's cursor or end the line is escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST_MESSAGE:
            text = f"{text[: _LONGEST_MESSAGE // 2]} … {text[-_LONGEST_MESSAGE // 4 :]}"
        return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    # repr escapes exactly these, and a few kinds of spaces besides.
    return repr(character)[1:-1] if unicodedata.category(character) in _UNSHOWN else character


class TransientError(UserError):
    """Not the input's fault, nor the settings': the same command may succeed, so what was finished is worth keeping."""


def printable(text: str) -> str:
    """Give a text for a terminal: names that come from files have no power over it."""
    return _COMMANDS.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a line for a person, at once; as escapes what a terminal would obey, or its encoding lacks."""
    stream = sys.stdout if file is None else file
    line = printable(str(text))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a command's `main`; a `UserError` becomes one line on stderr and exit status 1, Ctrl-C status 130.

    A command whose result goes to stdout ends with status 0 when its reader has read enough.
    """
    try:
        main()
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except BrokenPipeError:
        if not _reader_is_gone():
            # A broken connection, and nothing is finished.
            raise
        # `| head` closed stdout: the reader has what it wanted.
        sys.stderr.close()
        raise SystemExit(0) from None


def _reader_is_gone() -> bool:
    """Find out whether stdout is a pipe that nobody reads. A training's never is: it was replaced (streams.py)."""
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return False
    poll = select.poll()
    poll.register(stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
