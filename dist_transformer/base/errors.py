"""Errors that a user can act on: one sentence that names the file or field and the remedy."""

import re
import select
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

# Characters that control a terminal or hide text: control characters except line ends and tabs, line separators,
# direction marks, and halves of surrogate pairs, which stand for bytes that are not UTF-8.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Longer than any message of ours; a longer message contains a value from a file.
_LONGEST_MESSAGE = 4_000
# Control characters, halves of surrogate pairs, and line and paragraph separators.
_UNSHOWN = ("Cc", "Cs", "Zl", "Zp")


class UserError(Exception):
    """Bad input, settings or files. The message is one sentence for the user; no traceback is shown.

    Names and values in it may come from hostile files: characters that move the cursor or end the line are escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST_MESSAGE:
            text = f"{text[: _LONGEST_MESSAGE // 2]} … {text[-_LONGEST_MESSAGE // 4 :]}"
        return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    # repr escapes these, and also some kinds of spaces, which we keep.
    return repr(character)[1:-1] if unicodedata.category(character) in _UNSHOWN else character


class TransientError(UserError):
    """An error that input and settings did not cause. The same command may succeed, so finished work is kept."""


def printable(text: str) -> str:
    """Escape a text for a terminal, so that names from files cannot control it."""
    return _COMMANDS.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a line for a person and flush it. Escape control characters, and characters that the encoding lacks."""
    stream = sys.stdout if file is None else file
    line = printable(str(text))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a command's `main`. A `UserError` becomes one line on stderr and exit status 1; Ctrl-C becomes status 130.

    If the reader of stdout closes the pipe, the command ends with status 0.
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
            # Another connection broke, so the work is not finished.
            raise
        # The reader of stdout has enough, such as `| head`.
        sys.stderr.close()
        raise SystemExit(0) from None


def _reader_is_gone() -> bool:
    """Find out whether stdout is a pipe without a reader."""
    # In training it never is, because its stdout was replaced (runtime/streams.py).
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return False
    poll = select.poll()
    poll.register(stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
