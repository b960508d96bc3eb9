"""Streams that a process outlives, in processes of their own: a user's shell redirects them."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys, time
from dist_transformer.base.streams import outlive_streams

outlive_streams(remedy="the run continues")
# A file that is opened next must not become a standard stream.
kept = open(sys.argv[1], "w")
for number in range(300):
    print("line", number)
    if number == 100:
        time.sleep(0.5)
print("wide" * 20000)
print("to stderr", file=sys.stderr)
print("kept", file=kept)
raise SystemExit(75)
"""


def run(program: str, arguments: str, redirected: str) -> tuple[int, str]:
    """Status of a program, and what the shell's own stdout and stderr got; the arguments are words of the shell."""
    line = f"{shlex.join([sys.executable, '-c', program])} {arguments} {redirected}; exit ${{PIPESTATUS[0]}}"
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-c", line], **streams, text=True, check=False, timeout=600)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("redirected", "seen"),
    [
        ("> /dev/null", "to stderr\n"),
        ("> /dev/full", "stdout cannot be written (No space left on device): the run continues\nto stderr\n"),
        ("> /dev/full 2>&1", ""),
        (">&-", "to stderr\n"),
        ("<&- >&- 2>&-", ""),
        ("| head -n 1", "line 0\nstdout cannot be written (Broken pipe): the run continues\nto stderr\n"),
        ("2> /dev/full | tail -n 1", "stderr cannot be written (No space left on device): the run continues\n"),
    ],
)
def test_a_process_outlives_its_streams(tmp_path: Path, redirected: str, seen: str) -> None:
    kept = tmp_path / "kept"
    status, shown = run(PROGRAM, shlex.quote(str(kept)), redirected)
    # What the reader of a pipe has shown may come late.
    assert (status, sorted(shown.splitlines())) == (75, sorted(seen.splitlines()))
    assert kept.read_text() == "kept\n"


def test_a_disk_that_has_room_again_gets_the_next_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    program = """
import resource, sys
from dist_transformer.base.streams import outlive_streams
outlive_streams(remedy="the run continues")
print("first")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
print("second")
print("third")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print("fourth")
"""
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=log, stderr=subprocess.PIPE, text=True, check=True, timeout=600
        )
    assert (tmp_path / "log").read_text() == "first\nfourth\n"
    assert done.stderr == "stdout cannot be written (File too large): the run continues\n"


TOOL = """
import os, sys
from dist_transformer.base.errors import exit_on_user_error

def main():
    if sys.argv[1] == "print":
        for _ in range(100_000):
            print("a line of a result")
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"a broken connection, and stdout is well")

exit_on_user_error(main)
"""


def test_a_tool_ends_well_only_if_it_is_stdout_that_was_closed() -> None:
    for what, redirected, status in (("print", "| head -n 1", 0), ("connect", "| cat", 1), ("connect", "", 1)):
        ended, seen = run(TOOL, what, redirected)
        assert ended == status, seen
        assert ("BrokenPipeError" in seen) == (status == 1)


# A command that prints, as every command does it.
COMMAND = """
import sys
from dist_transformer.base.errors import exit_on_user_error, say

def main():
    if sys.argv[1] == "say":
        say("a line")
    elif sys.argv[1] == "bytes":
        sys.stdout.buffer.write(b"a line" * 10_000)
    elif sys.argv[1] == "exit":
        print("help")
        raise SystemExit(0)
    else:
        print("a line")
    say("a note", file=sys.stderr)

exit_on_user_error(main)
"""
FULL = "error: standard output cannot be written (No space left on device): choose another place"
CLOSED = "error: standard output is closed: open it, for instance with > FILE or > /dev/null"


@pytest.mark.parametrize("what", ["say", "bytes", "exit", "print"])
def test_a_result_that_cannot_be_written_is_one_error(what: str) -> None:
    """No traceback, and no second message at the interpreter's end."""
    status, seen = run(COMMAND, what, "> /dev/full")
    lines = seen.splitlines()
    assert (status, lines[-1]) == (1, FULL)
    # What is printed without a flush fails at the end.
    assert lines[:-1] == (["a note"] if what in ("bytes", "print") and lines[:-1] else [])
    assert run(COMMAND, what, ">&-") == (1, f"{CLOSED}\n")


@pytest.mark.parametrize("redirected", ["2> /dev/full", "2>&-", "2>&- <&-"])
def test_a_lost_note_changes_nothing_and_is_not_in_the_result(redirected: str) -> None:
    assert run(COMMAND, "print", redirected) == (0, "a line\n")


def test_an_argument_that_is_not_utf8_is_one_error() -> None:
    error = r"error: the argument caf\udce9.txt is not UTF-8: write it in UTF-8, or rename the file"
    assert run(COMMAND, r"$'caf\xe9.txt'", "") == (1, f"{error}\n")


# It fills the pipe, whose reader waits for the line on stderr: the signal comes when a part of a write is done.
INTERRUPTED = """
import signal, sys
from dist_transformer.base.streams import guard_streams

guard_streams(print)
signal.signal(signal.SIGALRM, lambda *_: print("signal", file=sys.stderr, flush=True))
signal.setitimer(signal.ITIMER_REAL, 0.2)
for first in range(0, 20_000, 500):
    print("\\n".join(f"line {number}" for number in range(first, first + 500)), flush=True)
"""


def test_a_signal_within_a_write_loses_no_line_and_prints_none_twice() -> None:
    words = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "signal\n"
        printed = process.stdout.read()
    assert process.returncode == 0
    assert printed == "".join(f"line {number}\n" for number in range(20_000))
